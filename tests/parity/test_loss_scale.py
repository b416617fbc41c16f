"""Regression tests for two defects observed in DeepSpeed 0.19.8.

1. fp16 at stage 0: `backward` did not multiply the loss by the scale, and `step` divided by it.  SGD at rate 0.1 with
   a scale of 2^10 and a gradient of 2 must move a weight by -0.2; it moved by -0.000225 (at stage 2 by -0.20002).
2. At the step after which a dynamic scale doubles, gradients were divided by the new scale: the update was half
   as large (2.0 instead of 4.0), and stage 3 reported half the norm (0.5 instead of 1.0).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zengine
import zpartition

STAGES = [0, 1, 2, 3]
DYNAMIC = {"initial_scale_power": 4, "loss_scale_window": 2}
SECTIONS = {
    "fp16 dynamic": {"fp16": {"enabled": True, **DYNAMIC}},
    "fp16 static": {"fp16": {"enabled": True, "loss_scale": 1024}},
    "autocast fp16": {"torch_autocast": {"enabled": True, "dtype": "fp16"}},
}


class Weight(nn.Module):
    """loss = factor * w: the gradient of the one weight is `factor`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.w * factor).sum()


def made(stage: int, lr: float, **config: Any) -> zengine.Engine:
    base = {
        "train_batch_size": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zengine.initialize(model=Weight(), config={**base, **config})[0]


def moved(engine: zengine.Engine, factor: float) -> tuple[float, zengine.StepReport]:
    """Return (change of the master in one step, its report)."""
    before = zpartition.safe_get_full_fp32_param(engine.module.w).item()
    engine.backward(engine(factor))
    report = engine.step()
    return zpartition.safe_get_full_fp32_param(engine.module.w).item() - before, report


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", SECTIONS)
def test_defect_1_a_scaled_loss_moves_the_weight_by_the_learning_rate(name: str, stage: int) -> None:
    engine = made(stage, 0.1, **SECTIONS[name])
    change, report = moved(engine, 2.0)
    assert change == pytest.approx(-0.2, rel=1e-6)
    assert report.grad_norm == 2.0
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_defect_2_the_update_at_which_the_scale_doubles_is_complete(stage: int) -> None:
    engine = made(stage, 4.0, **SECTIONS["fp16 dynamic"])
    steps = [moved(engine, 1.0) for _ in range(8)]
    assert [report.loss_scale for _, report in steps] == [16, 16, 16, 32, 32, 64, 64, 128]
    assert [change for change, _ in steps] == [-4.0] * 8
    assert [report.grad_norm for _, report in steps] == [1.0] * 8
    engine.close()


# Overflows at steps 2, 3, 4 and 9, a hysteresis of 2, a window of 3: the scale that each step's gradients carried,
# by DeepSpeed's rule (growth when the clean steps since the last overflow, less one, fill a window).
GOLDEN = [16, 16, 16, 8, 4, 4, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize("stage", STAGES)
def test_a_dynamic_scale_follows_its_golden_trace(stage: int) -> None:
    engine = made(stage, 1.0, fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3})
    steps = [moved(engine, float("inf") if step in (2, 3, 4, 9) else 1.0) for step in range(1, 13)]
    assert [bool(report) for _, report in steps] == [step not in (2, 3, 4, 9) for step in range(1, 13)]
    assert [change for change, _ in steps] == [0.0 if step in (2, 3, 4, 9) else -1.0 for step in range(1, 13)]
    assert [report.loss_scale for _, report in steps] == GOLDEN
    engine.close()


def test_a_static_scale_skips_and_stays() -> None:
    engine = made(1, 1.0, **SECTIONS["fp16 static"])
    steps = [moved(engine, factor) for factor in (1.0, float("nan"), 1.0)]
    assert [(change, report.loss_scale) for change, report in steps] == [(-1.0, 1024), (0.0, 1024), (-1.0, 1024)]
    engine.close()
