"""Rollouts over a base of 4 or 8 bits with adapters (QLoRA), whose weights were float32 before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_lm import PROMPTS, TinyLM, engine_of, train
from torch import nn

from zcomm.testing import run_ranks
from zengine.adapters import LoRAConfig, add_lora, merge_lora, quantize_base
from zengine.rollout import RolloutConfig, SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=6)
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
FARTHEST = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}  # of log-probabilities, by rounding


def qlora(format: str) -> nn.Module:
    """A model with layers that are quantized and adapted (q, v), quantized alone (grow), and plain."""
    model = TinyLM(width=64)
    quantize_base(model, format, ["q", "v", "grow"])
    add_lora(model, LoRAConfig(lora_r=2, target_mods=["q", "v"]))
    return model


def _rollouts(stage: int, dtype: str, format: str, exact: bool) -> list[Any]:
    engine, found = engine_of(stage, qlora(format), **DTYPES[dtype]), []
    for steps in (0, 2):
        train(engine, steps)
        rollout = engine.rollout(
            PROMPTS, n=2, sampling=SAMPLING, seed=1, config=RolloutConfig(exact=exact, compare=6)
        )
        assert rollout.stats.max_delta_log_prob <= (0.0 if exact else FARTHEST[dtype])
        sampled = [each.log_probs for each in rollout.samples]
        assert not exact or engine.log_probs(rollout.samples) == sampled
        found.append([(each.tokens, each.log_probs) for each in rollout.samples])
    engine.close()
    return found


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rollouts_compute_in_the_dtype_of_training(dtype: str, exact: bool) -> None:
    (first,) = run_ranks(_rollouts, 1, 0, dtype, "nf4", exact)
    assert first[0] != first[1]
    for world in (1, 2):
        for found in run_ranks(_rollouts, world, 3, dtype, "nf4", exact):
            assert found[0] == first[0], f"world {world}, stage 3"


def test_other_formats() -> None:
    for exact in (False, True):
        run_ranks(_rollouts, 1, 0, "bf16", "int8", exact)


def test_an_exact_gradient_keeps_codes_and_no_dense_weight() -> None:
    engine, ids = engine_of(0, qlora("nf4"), **DTYPES["bf16"]), torch.tensor([PROMPTS[2]])
    engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=RolloutConfig(exact=True))
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine(ids[:, :-1], ids[:, 1:])
    shapes = {tuple(each.shape) for each in kept if each.dtype == torch.bfloat16}
    assert (128, 64) not in shapes  # of `grow`
    assert (64, 128) in shapes  # of `shrink`, which is plain
    engine.backward(loss)
    assert all(bool(layer.q.lora_B.grad is not None) for layer in engine.module.blocks)
    engine.step()
    engine.close()


def test_merged_layers_have_the_dtype_that_was_trained() -> None:
    engine = engine_of(0, qlora("nf4"), **DTYPES["bf16"])
    train(engine, 1)
    module = engine.module
    engine.close()
    dtype, ids = module.head.weight.dtype, torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        before = module(ids)
        merge_lora(module, dequantize=True)
        assert {each.q.weight.dtype for each in module.blocks} == {dtype}
        assert float((module(ids) - before).abs().max()) < 5e-2
