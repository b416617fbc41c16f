"""Rollouts of models that training splits: over tensor ranks, which share prompts, and expert ranks, which do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_lm import PROMPTS

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.rollout import RolloutConfig, SamplingConfig

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "initializer_range": 0.3,
}
SPLITS: dict[str, dict[str, Any]] = {
    "": {},
    "tensor": {"tensor_parallel": {"autotp_size": 2}},
    "expert": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
}
SAMPLING = SamplingConfig(max_new_tokens=6)


def trained(stage: int, split: str, with_experts: bool) -> Any:
    """Return an engine after a step with the same tokens on all ranks."""
    torch.manual_seed(0)
    model = (
        transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))
        if with_experts
        else transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 40},
        **SPLITS[split],
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    ids = torch.arange(24).view(2, 12) % 29
    engine.backward(engine(ids, labels=ids).loss)
    engine.step()
    return engine


def tokens(engine: Any, prompts: Any, **given: Any) -> list[tuple[int, ...]]:
    return [each.tokens for each in engine.rollout(prompts, n=2, sampling=SAMPLING, seed=1, **given).samples]


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    return str(caught.value)


def _alone(with_experts: bool) -> list[tuple[int, ...]]:
    engine = trained(0, "", with_experts)
    found = tokens(engine, PROMPTS)
    engine.close()
    return found


def _own_prompts(stage: int) -> tuple[list[tuple[int, ...]], float, int, list[tuple[int, ...]], str]:
    engine, rank = trained(stage, "expert", with_experts=True), zcomm.group_rank()
    own = (PROMPTS[:1], PROMPTS[1:])[rank]
    rollout = engine.rollout(own, n=2, sampling=SAMPLING, seed=1, config=RolloutConfig(compare=4))
    references = engine.log_probs(rollout.samples)
    later = tokens(engine, own if rank else [])
    exact = message(lambda: tokens(engine, own, config=RolloutConfig(exact=True)))
    engine.close()
    return [each.tokens for each in rollout.samples], rollout.stats.max_delta_log_prob, len(references), later, exact


@pytest.mark.parametrize("stage", [0, 3])
def test_expert_ranks_have_prompts_of_their_own(stage: int) -> None:
    (alone,) = run_ranks(_alone, 1, True)
    first, second = run_ranks(_own_prompts, 2, stage)
    assert first[0] == alone[:2]
    assert second[0] == alone[2:]
    assert max(first[1], second[1]) < 1e-5
    assert (first[2], second[2]) == (2, 4)
    assert (first[3], second[3]) == ([], alone[2:])
    assert "split over 2 expert ranks" in first[4]


def _mistakes(stage: int) -> tuple[list[tuple[int, ...]], list[str], float]:
    engine, rank = trained(stage, "tensor", with_experts=False), zcomm.group_rank() % 2
    found = [
        message(lambda: tokens(engine, [[3 + rank, 4]])),
        message(lambda: tokens(engine, [[3]] * (1 + rank))),
        message(lambda: tokens(engine, [[3] * (3 + 40 * rank)])),
        message(lambda: tokens(engine, [[3]], config=RolloutConfig(num_slots=2 + rank))),
        message(lambda: tokens(engine, [[3]], config=RolloutConfig(exact=True))),
    ]
    after = tokens(engine, PROMPTS, config=RolloutConfig())
    coded = engine.rollout(PROMPTS, n=2, sampling=SAMPLING, config=RolloutConfig(quantize="int8", compare=6))
    engine.close()
    return after, found, coded.stats.kl


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (4, 3)])
def test_tensor_ranks_share_prompts_and_say_how_they_differ(world: int, stage: int) -> None:
    (alone,) = run_ranks(_alone, 1, False)
    for after, found, kl in run_ranks(_mistakes, world, stage):
        assert after == alone
        assert "prompt 0 of rank 1 is [4, 4], of rank 0 [3, 4]" in found[0]
        assert "rank 1 has 2 prompts, rank 0 1" in found[1]
        assert "tensor rank 1: prompt 0 has 43 tokens" in found[2]
        assert "rank 1 has {'num_slots': 3" in found[3]
        assert "split over 2 tensor ranks" in found[4]
        assert 0 < kl < 1e-3
