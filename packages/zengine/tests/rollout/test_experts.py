"""Rollouts of a model with stacked experts, whole and over expert ranks, draw the samples of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_lm import PROMPTS

import zengine
from zcomm.testing import run_ranks
from zengine.rollout import RolloutConfig, SamplingConfig

transformers = pytest.importorskip("transformers")
EXPERT_RANKS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


def roll(stage: int, more: dict[str, Any]) -> tuple[list[tuple[int, ...]], float]:
    """Return the tokens after two steps, and the largest difference to log-probabilities of the trainer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, **heads, max_position_embeddings=48, initializer_range=0.3)
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 40},
        **more,
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    ids, sampling = torch.arange(24).view(2, 12) % 29, SamplingConfig(max_new_tokens=6)
    found = []
    for _ in range(2):
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        rollout = engine.rollout(PROMPTS, n=2, sampling=sampling, seed=1, config=RolloutConfig(compare=4))
        found += [sample.tokens for sample in rollout.samples]
    engine.close()
    return found, rollout.stats.max_delta_log_prob


@pytest.mark.parametrize(("stage", "more"), [(3, {}), (1, EXPERT_RANKS), (3, EXPERT_RANKS)])
def test_samples_of_experts_are_those_of_one_rank(stage: int, more: dict[str, Any]) -> None:
    ((alone, _),) = run_ranks(roll, 1, 0, {})
    for tokens, difference in run_ranks(roll, 2, stage, more):
        assert tokens == alone
        assert difference < 1e-5
