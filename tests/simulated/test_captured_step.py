"""Whole steps in a CUDA graph, on the simulated device's recorder: the bits of plain steps."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
from simulated_cuda.library import host_waits
from zengine.captured_step import NUM_EAGER

DEVICE = torch.device("cuda", 0)
PRECISION: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {"bf16": {"enabled": True}}),
    "fp16": (
        torch.float16,
        {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with contextlib.closing(zcomm.init()):
        yield


def make_engine(stage: int, dtype: str, **more: Any) -> zengine.Engine:
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 3000},
        "gradient_clipping": 0.05,
        **PRECISION[dtype][1],
        **more,
    }
    return zengine.initialize(model=model, config=config)[0]


def batches(dtype: str, num: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num):
        values = torch.randn(4, 16, generator=generator).to(DEVICE, PRECISION[dtype][0])
        yield values, torch.randn(4, 4, generator=generator).to(DEVICE)


def train(engine: zengine.Engine, dtype: str, captures: bool, num: int = NUM_EAGER + 5) -> tuple[list[Any], Any]:
    """Return the reports and the final state; the sixth batch overflows in fp16 and is NaN in the others."""

    def loss_of(values: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(engine(values).float(), targets)

    step = zengine.capture_step(engine, loss_of) if captures else None
    reports = []
    for number, (values, targets) in enumerate(batches(dtype, num)):
        if number == NUM_EAGER + 2:
            values = values * (6e4 if dtype == "fp16" else float("nan"))
        if step is not None:
            reports.append(step(values, targets))
            continue
        engine.backward(loss_of(values, targets))
        report = engine.step()
        assert report is not None
        reports.append(report)
    state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    masters = [each.master.clone() for each in engine.parts.partition.storages]
    moments = [
        value.clone()
        for entry in engine.parts.optimizer.optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    return reports, (list(state.values()), masters, moments, engine.parts.scaler.state_dict())


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replayed_steps_equal_plain_ones_bit_for_bit(stage: int, dtype: str) -> None:
    with contextlib.closing(make_engine(stage, dtype)) as engine:
        expected, (*tensors, scale) = train(engine, dtype, captures=False)
        counters = engine.clock.state_dict()
    with contextlib.closing(make_engine(stage, dtype)) as engine:
        found, (*same, same_scale) = train(engine, dtype, captures=True)
        assert engine.clock.state_dict() == counters
    assert [each.applied for each in expected].count(False) == 1
    for one, other in zip(expected, found, strict=True):
        for name in ("applied", "step", "applied_steps", "samples", "lr", "loss_scale"):
            assert getattr(one, name) == getattr(other, name), name
        if one.applied:
            assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    for lists in zip(tensors, same, strict=True):
        for one, other in zip(*lists, strict=True):
            assert one.equal(other)
    assert scale == same_scale
    if dtype == "fp16":
        assert scale["factor"] != 256
