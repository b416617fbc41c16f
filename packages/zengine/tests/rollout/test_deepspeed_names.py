"""The hybrid engine under DeepSpeed's names: its parameters have ZeRO's marks."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_lm import PROMPTS, TinyLM, config, train

import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.rollout import SamplingConfig
from zprecision.backends import native

SAMPLING = SamplingConfig(max_new_tokens=5)


def engine_of(stage: int, **changes: Any) -> Any:
    model = TinyLM()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage, **changes))[0]


def _fused(stage: int, dtype: str) -> list[Any]:
    engine = engine_of(stage, **({dtype: {"enabled": True}} if dtype else {}))
    assert all(hasattr(param, "ds_id") == (stage == 3) for param in engine.module.parameters())
    found = []
    for steps in (0, 2):
        train(engine, steps)
        samples = engine.rollout(PROMPTS, n=2, sampling=SAMPLING, seed=1).samples
        with engine._rollouts.weights.open():
            report = engine._rollouts.weights.steps(2).fused
        assert report.reasons == {}
        assert report.fused == ("blocks.0", "blocks.1", "head")
        found.append([(each.tokens, each.log_probs) for each in samples])
    engine.close()
    return found


@pytest.mark.skipif(native.library() is None, reason="the kernels are not built")
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_marked_weights_of_stage_3_are_decoded_by_the_fused_kernels(dtype: str) -> None:
    (expected,) = run_ranks(_fused, 1, 2, dtype)
    for world in (1, 2):
        assert run_ranks(_fused, world, 3, dtype)[0][0] == expected[0], world
