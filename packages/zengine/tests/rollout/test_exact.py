"""Exact rollouts: log-probabilities of `engine.rollout` are those of `engine(batch)`, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_lm import PROMPTS, TinyLM, engine_of, train

from zcomm.testing import run_ranks
from zengine.adapters import LoRAConfig, add_lora
from zengine.rollout import RolloutConfig, SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=12, stop_tokens=(3,))
EXACT = RolloutConfig(exact=True, num_slots=3, compare=2)


def trained(engine: Any, rollout: Any) -> list[tuple[float, ...]]:
    """Log-probabilities of the samples by one forward of the engine, in train mode, in one padded batch."""
    rows = [(*sample.prompt, *sample.tokens) for sample in rollout.samples]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    logits = engine.train()(ids)
    assert logits.requires_grad
    found = torch.log_softmax(logits.float(), -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].detach()
    return [
        tuple(found[index, len(sample.prompt) - 1 : len(rows[index]) - 1].tolist())
        for index, sample in enumerate(rollout.samples)
    ]


def _rollouts(stage: int, is_bf16: bool, with_adapters: bool) -> list[Any]:
    model = TinyLM()
    if with_adapters:
        add_lora(model, LoRAConfig(lora_r=2, target_mods=["q", "v"]))
    engine = engine_of(stage, model, bf16={"enabled": is_bf16})
    made = []
    for steps in (0, 3):
        if steps:
            train(engine, steps)
        rollout = engine.rollout(PROMPTS, n=4, sampling=SAMPLING, config=EXACT)
        assert rollout.stats.kl == rollout.stats.max_delta_log_prob == 0.0
        assert trained(engine, rollout) == [sample.log_probs for sample in rollout.samples], "bit for bit"
        assert engine.log_probs(rollout.samples) == [sample.log_probs for sample in rollout.samples]
        other = RolloutConfig(exact=True, num_slots=7)
        assert engine.rollout(PROMPTS, n=4, sampling=SAMPLING, config=other).samples == rollout.samples
        made.append([(sample.prompt, sample.tokens, sample.log_probs) for sample in rollout.samples])
    if with_adapters:
        reference = engine.log_probs(rollout.samples, reference=True)
        assert reference != [sample.log_probs for sample in rollout.samples]
    engine.close()
    assert not any("forward" in vars(each) for each in model.modules())
    return made


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("with_adapters", [False, True])
def test_a_rollout_has_the_bits_of_the_trainer(is_bf16: bool, with_adapters: bool) -> None:
    first = run_ranks(_rollouts, 1, 0, is_bf16, with_adapters)[0]
    assert first[0] != first[1]
    rows = ((2, 0), (4, 3)) if with_adapters else ((2, 0), (2, 1), (2, 2), (1, 3), (2, 3), (4, 3))
    for world, stage in rows:
        for found in run_ranks(_rollouts, world, stage, is_bf16, with_adapters):
            assert found[0] == first[0], f"world {world}, stage {stage}: of weights, prompt and seed alone"


def test_a_rollout_that_is_not_exact_gives_the_module_its_own_forward_back() -> None:
    engine, ids = engine_of(), torch.tensor([PROMPTS[2]])
    plain = engine(ids)
    engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=EXACT)
    assert any("forward" in vars(each) for each in engine.module.modules())
    engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=RolloutConfig())
    assert not any("forward" in vars(each) for each in engine.module.modules())
    assert torch.equal(engine(ids), plain)
    engine.close()


def test_a_copy_of_an_exact_module_computes_with_its_own_weights() -> None:
    engine, ids = engine_of(), torch.tensor([PROMPTS[2]])
    engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=EXACT)
    copied = copy.deepcopy(engine.module)
    with torch.no_grad():
        copied.norm.weight.mul_(2)
        copied.blocks[0].q.weight.zero_()
    expected = TinyLM()
    expected.load_state_dict(copied.state_dict())
    assert torch.equal(copied(ids), expected(ids))
    engine.close()


def test_a_model_that_is_not_exact_says_which_block_and_why() -> None:
    model = TinyLM()
    model.blocks[1].shrink = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Dropout(0.1))
    engine = engine_of(0, model)
    with pytest.raises(ValueError, match=r"blocks\.1\.shrink\.1\.p is 0\.1"):
        engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=EXACT)
    assert not any("forward" in vars(each) for each in model.modules())
    engine.close()
