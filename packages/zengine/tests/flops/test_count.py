"""Operations of one step, counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zengine


def test_a_steps_products_are_counted_once_and_charted_from_then_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    engine, *_ = zengine.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "bench_steps": 3,
            "timers": {"throughput": {"count_flops_at": 2}},
        },
    )  # fmt: skip
    for _ in range(4):
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8)).mean())
            engine.step()
    # Forward of both, and in backward the weights of both and the input of the second: products of 2 m n k each.
    per_micro_step = 2 * 2 * (8 * 16 + 16 * 4) * 2 + 2 * 2 * 16 * 4
    telemetry = engine.parts.telemetry
    assert telemetry.meter.flops_per_sample == per_micro_step / 2
    assert telemetry.throughput.total.counted_flops == pytest.approx(2 * 3 * per_micro_step)
    engine.close()
