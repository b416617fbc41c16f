"""Buffers of models trained in 16 bits: running statistics equal those of float32, and models still run.

Oracles: a float32 norm on the same inputs, and a model cast by hand.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
from zcomm.testing import run_ranks

BF16, F16 = torch.bfloat16, torch.float16
SECTIONS = {BF16: {"bf16": {"enabled": True}}, F16: {"fp16": {"enabled": True, "loss_scale": 64}}}
STRICT = {"stage3_unit_size": 300, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}


def made(model: nn.Module, dtype: torch.dtype, stage: int, **more: Any) -> zengine.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **(STRICT if stage == 3 else {})},
        **SECTIONS[dtype],
        **more,
    }
    return zengine.initialize(model=model, config=config)[0]


class Normed(nn.Module):
    """Records the inputs of its norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.norm(x))


def statistics_of(dtype: torch.dtype, stage: int, num_steps: int) -> dict[str, Tensor]:
    """Return the engine's buffers, and those of a float32 norm on rank 0's data."""
    engine, oracle = made(Normed(), dtype, stage), nn.BatchNorm1d(8)
    for step in range(num_steps):
        generators = [torch.Generator().manual_seed(10 * step + rank) for rank in (0, zcomm.group_rank())]
        first, own = ((100.3 + torch.randn(8, 8, generator=each)).to(dtype) for each in generators)
        oracle(first.float())
        engine.backward(engine(own).float().square().mean())
        engine.step()
    module = engine.module
    found = {"mean": module.norm.running_mean, "var": module.norm.running_var, "calls": module.calls}
    found = {name: buffer.clone() for name, buffer in found.items()}
    engine.close()
    return {**found, "oracle mean": oracle.running_mean, "oracle var": oracle.running_var}


@pytest.mark.parametrize("dtype", SECTIONS, ids=str)
@pytest.mark.parametrize(("stage", "world_size", "num_steps"), [(0, 1, 300), (2, 2, 60), (3, 2, 60)])
def test_running_statistics_are_those_of_float32(
    dtype: torch.dtype, stage: int, world_size: int, num_steps: int
) -> None:
    for found in run_ranks(statistics_of, world_size, dtype, stage, num_steps):
        assert {value.dtype for value in found.values()} == {torch.float32}
        assert found["calls"] == num_steps
        torch.testing.assert_close(found["mean"], found["oracle mean"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["var"], found["oracle var"], rtol=1e-4, atol=1e-4)
        assert world_size > 1 or float(found["mean"].mean()) == pytest.approx(100.3, abs=0.2)


class Encoder(nn.Module):
    """torch's layers after a buffer of positions, as in its tutorial."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, width)
        angles = torch.arange(9).unsqueeze(1) * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], 2).flatten(1))
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids) + self.positions))


def losses_of(stage: int, dtype: torch.dtype) -> list[float]:
    engine = made(Encoder(), dtype, stage)
    ids = torch.arange(72).view(8, 9) % 11
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.roll(-1, 1).flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.module.positions.dtype == torch.float32
    engine.eval()
    with torch.no_grad():
        assert engine(ids).dtype == dtype
    engine.close()
    return losses


@pytest.mark.parametrize("dtype", SECTIONS, ids=str)
def test_a_transformer_with_positions_in_a_buffer_trains_equally_at_every_stage(dtype: torch.dtype) -> None:
    first, *others = [run_ranks(losses_of, 2, stage, dtype)[0] for stage in range(4)]
    assert first[-1] < 0.9 * first[0]
    assert all(losses == first for losses in others)
    wide = zengine.initialize(model=Encoder(), config={"train_batch_size": 8})[0]
    ids = torch.arange(72).view(8, 9) % 11
    plain = nn.functional.cross_entropy(wide(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    assert first[0] == pytest.approx(plain.item(), rel=0.02)


class Masked(nn.Module):
    """Adds a float32 mask to bf16 scores, and multiplies the sum by bf16 values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x.to(self.linear.weight.dtype))
        return (x @ x.T + self.mask).softmax(-1) @ x


def test_dtype_errors_beside_a_wide_buffer_are_explained_and_the_fix_works() -> None:
    engine = made(Masked(), BF16, 0)
    with pytest.raises(RuntimeError, match=r'mask.*"data_types": \{"buffer_dtype": "bfloat16"\}'):
        engine(torch.ones(8, 4))
    engine.close()
    asked = made(Masked(), BF16, 0, data_types={"buffer_dtype": "bf16"})
    assert asked(torch.ones(8, 4)).dtype == asked.module.mask.dtype == BF16
    asked.close()


def test_an_engine_that_is_closed_leaves_no_hook() -> None:
    model = Encoder()
    made(model, BF16, 2).close()
    assert not any(child._forward_pre_hooks for child in model.modules())
