"""DeepSpeed's rollout interface: tensors in, tensors out; and the losses over them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_lm import engine_of, train
from torch.nn import functional as F

from zengine.deepspeed.runtime.rollout import (
    HybridEngineRollout,
    ResponseTokenBatch,
    RolloutBatch,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
)

TOKENIZER = SimpleNamespace(pad_token_id=None, eos_token_id=0)


def test_a_batch_has_padded_prompts_and_samples_that_end() -> None:
    engine = engine_of()
    train(engine, 1)
    rollout = build_rollout(RolloutConfig(num_slots=3), student_engine=engine, tokenizer=TOKENIZER)
    assert isinstance(rollout, HybridEngineRollout)
    ids = torch.tensor([[0, 0, 0, 5, 6], [0, 0, 7, 8, 9]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]])
    rule = SamplingConfig(max_new_tokens=12, n_samples_per_prompt=2)
    batch = rollout.generate(RolloutRequest(ids, mask), rule)
    assert rule.stop_tokens == ()  # the caller's is not changed
    assert (batch.batch_size, batch.response_start_idx.tolist()) == (4, [5] * 4)
    assert torch.equal(batch.input_ids[:, :5], ids.repeat_interleave(2, 0))
    assert torch.equal(batch.attention_mask[:, :5], mask.repeat_interleave(2, 0))
    new = batch.attention_mask[:, 5:].bool()
    assert torch.equal(new, new.cummin(1).values)  # tokens, then padding
    targets = ResponseTokenBatch.from_rollout(batch)
    for row in range(4):
        first = 5 - int(mask[row // 2].sum())
        tokens = batch.input_ids[row, first:]
        with torch.no_grad():
            rows = F.log_softmax(engine.module(tokens[None])[0].double(), -1)
        for at in range(5, batch.seq_len):
            if batch.attention_mask[row, at]:
                expected = float(rows[at - first - 1, batch.input_ids[row, at]])
                assert float(batch.log_probs[row, at]) == pytest.approx(expected, abs=1e-5)
                assert targets.response_mask[row, at - 1]
    assert rollout.last_stats.num_tokens == int(new.sum())
    rollout.sync_weights(1)
    rollout.shutdown()
    engine.close()


def test_what_is_missing_is_told() -> None:
    engine = engine_of(hybrid_engine={"enabled": False})
    with pytest.raises(TypeError, match=r'makes no rollouts: write "hybrid_engine": \{"enabled": true\}'):
        HybridEngineRollout(engine, TOKENIZER)
    engine.close()
    with pytest.raises(ValueError, match="needs student_engine= and tokenizer="):
        build_rollout(RolloutConfig())
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"prompt_attention_mask has the shape \(2, 2\)"):
        RolloutRequest(ids, ids[:, :2])
    with pytest.raises(ValueError, match=r"response_start_idx must be \(2,\)"):
        RolloutBatch(ids, ids, torch.ones(3))
    with pytest.raises(ValueError, match=r"must be in \[1, 3\]; it is \[0, 4\]"):
        ResponseTokenBatch.from_rollout(RolloutBatch(ids, ids, torch.tensor([0, 4])))
