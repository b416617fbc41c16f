"""Loss scaling and non-finite gradients: applied and skipped updates, and their reports."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine import LossScaleExhausted
from zengine.step_report import UNKNOWN_RANK, NonFiniteGradient


def make(model: nn.Module, **config: object):
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return zengine.initialize(model=model, config={**base, **config})


class Weight(nn.Module):
    """loss = 2 w: the gradient is 2 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, factor: float = 1.0) -> torch.Tensor:
        return (2.0 * self.w).sum() * factor


def scaled_engine(stage: int, **fp16: object):
    return make(Weight(), fp16={"enabled": True, **fp16}, zero_optimization={"stage": stage})[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_fp16_multiplies_the_loss_at_every_stage(stage):
    engine = scaled_engine(stage, initial_scale_power=10)
    engine.backward(engine())
    engine.step()
    torch.testing.assert_close(engine.module.w.float(), torch.full((4,), 0.8), rtol=1e-3, atol=0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_update_at_which_the_scale_doubles_is_not_half_size(stage):
    engine = scaled_engine(stage, initial_scale_power=4, loss_scale_window=2)
    updates, scales = [], []
    for _ in range(8):
        before = engine.module.w.float().clone()
        engine.backward(engine())
        report = engine.step()
        updates.append((before - engine.module.w.float()).mean().item())
        scales.append(report.loss_scale)
        assert report.grad_norm == pytest.approx(4.0)
    assert len(set(scales)) > 1
    assert updates == pytest.approx([0.2] * 8, rel=2e-2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_overflow_skips_the_update_says_where_and_counts(stage):
    engine = scaled_engine(stage, initial_scale_power=4, hysteresis=1)
    engine.backward(engine())
    engine.step()
    before = copy.deepcopy(engine.state_dict())
    engine.backward(engine(float("inf")))
    report = engine.step()
    assert not report
    assert report.reason == "gradient of w is inf (step 2, loss scale 16): step skipped, scale now 8"
    assert (report.step, report.applied_steps, report.skipped_steps) == (2, 1, 1)
    assert not engine.was_step_applied()
    assert torch.equal(before["w"], engine.state_dict()["w"])
    engine.backward(engine())
    assert engine.step()


def test_nan_gradients_are_skipped_in_fp32_too():
    engine = make(Weight())[0]
    engine.backward(engine(float("nan")))
    report = engine.step()
    assert report.reason == "gradient of w is nan (step 1, loss scale 1): step skipped"
    assert torch.equal(engine.module.w, torch.ones(4))


def test_bf16_applies_whatever_comes_when_told_not_to_check():
    engine = make(Weight(), bf16={"enabled": True, "check_grad_overflow": False})[0]
    engine.backward(engine(float("nan")))
    assert engine.step()
    assert engine.module.w.isnan().all()


def test_a_scale_at_its_floor_that_still_overflows_ends_the_run_with_the_parameter():
    engine = scaled_engine(0, initial_scale_power=0, hysteresis=1)
    engine.backward(engine(float("inf")))
    with pytest.raises(LossScaleExhausted, match="gradient of w is inf in step 1, with the loss scale at its floor"):
        engine.step()


def test_the_schedule_moves_with_applied_updates_only():
    engine = make(
        Weight(),
        fp16={"enabled": True, "initial_scale_power": 4},
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    )[0]
    rates = []
    for factor in (1.0, 1.0, float("inf"), 1.0, 1.0):
        engine.backward(engine(factor))
        rates.append(engine.step().lr[0])
    assert rates == pytest.approx([0.0, 0.0, 0.25, 0.25, 0.5])


class Culprits(nn.Module):
    """Two parameters; the gradient of the second is NaN where `poison` is, and the loss is a number all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, poison: bool) -> torch.Tensor:
        spoilt = torch.zeros(3).mul(self.b).sqrt() if poison else self.b  # the root of 0 has an infinite slope
        return self.a.sum() + spoilt.sum()


def _nan_on_rank_1(stage: int) -> str:
    engine = make(Weight(), zero_optimization={"stage": stage})[0]
    engine.backward(engine(float("nan") if zcomm.group_rank() == 1 else 1.0))
    report = engine.step()
    assert torch.equal(engine.module.w, torch.ones(4))
    assert report.nonfinite == NonFiniteGradient(parameter="w", kind="nan", rank=1)

    engine = make(Culprits(), zero_optimization={"stage": stage})[0]
    ranks = []
    for _ in range(2):
        engine.backward(engine(zcomm.group_rank() == 1))
        culprit = engine.step().nonfinite
        assert (culprit.parameter, culprit.kind) == ("b", "nan")
        ranks.append(culprit.rank)
    assert ranks == [UNKNOWN_RANK, 1]  # the loss was a number, so nobody looked; from then on all do
    engine.backward(engine(False))
    assert engine.step().nonfinite is None
    return report.reason


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_ranks_decide_alike_when_one_has_a_nan_and_name_it(stage):
    expected = "gradient of w is nan on rank 1 (step 1, loss scale 1): step skipped"
    assert run_ranks(_nan_on_rank_1, 2, stage) == [expected] * 2
