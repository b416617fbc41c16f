from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import zoptim
from zoptim import LRRangeTest, OneCycle

CYCLE: dict[str, Any] = {
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "cycle_first_step_size": 3,
    "decay_lr_rate": 0.5,
    "decay_step_size": 1,
}


pytestmark = pytest.mark.filterwarnings("ignore:OneCycle sets betas")


def make_optimizer(cls: Any = zoptim.AdamW, groups: int = 1, **more: Any) -> torch.optim.Optimizer:
    return cls([{"params": [torch.ones(2, requires_grad=True)]} for _ in range(groups)], lr=0.01, **more)


def curve(cls: Any, count: int, **params: Any) -> tuple[list[float], list[float]]:
    """lr and betas[0] before the first step(), and after steps 1, 2, ..."""
    optimizer = make_optimizer()
    schedule = cls(optimizer, **params)
    lrs, momenta = [], []
    for _ in range(count):
        (group,) = optimizer.param_groups
        lrs.append(group["lr"])
        momenta.append(group["betas"][0])
        schedule.step()
    return lrs, momenta


def test_one_cycle_golden_values() -> None:
    lrs, momenta = curve(OneCycle, 10, **CYCLE)
    assert lrs == pytest.approx([0.01, 0.04, 0.07, 0.1, 0.07, 0.04, 0.01, 0.006667, 0.005, 0.004], abs=5e-7)
    golden = [0.8, 0.8667, 0.8333, 0.8, 0.8333, 0.8667, 0.9, 0.9]
    assert momenta[:8] == pytest.approx(golden, abs=5e-5)


@pytest.mark.parametrize(
    ("staircase", "golden"),
    [(False, [0.01, 0.015, 0.02, 0.025, 0.03, 0.035]), (True, [0.01, 0.01, 0.02, 0.02, 0.03, 0.03])],
)
def test_range_test_golden_values(staircase: bool, golden: list[float]) -> None:
    params = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0}
    lrs, momenta = curve(LRRangeTest, 6, **params, lr_range_test_staircase=staircase)
    assert lrs == pytest.approx(golden, abs=5e-7)
    assert set(momenta) == {0.9}, "the range test leaves momentum alone"


def test_exact_peak_begins_the_momentum_at_its_maximum() -> None:
    lrs, momenta = curve(OneCycle, 4, **CYCLE, exact_peak=True)
    assert momenta == pytest.approx([0.9, 0.8667, 0.8333, 0.8], abs=5e-5)
    assert lrs == pytest.approx([0.01, 0.04, 0.07, 0.1])


def test_the_two_halves_may_differ_and_the_decay_may_be_absent() -> None:
    lrs, _ = curve(OneCycle, 7, cycle_min_lr=0, cycle_max_lr=0.4, cycle_first_step_size=2, cycle_second_step_size=4)
    assert lrs == pytest.approx([0, 0.2, 0.4, 0.3, 0.2, 0.1, 0])
    params = {**CYCLE, "decay_step_size": 0}
    assert curve(OneCycle, 12, **params)[0][6:] == pytest.approx([0.01] * 6)


def test_stairs_apply_to_both_halves_unless_given_separately() -> None:
    lrs, _ = curve(OneCycle, 9, cycle_min_lr=0, cycle_max_lr=1, cycle_first_step_size=4, cycle_first_stair_count=2)
    assert lrs == pytest.approx([0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0])


def test_momentum_grows_after_the_cycle_with_its_own_rate() -> None:
    momenta = curve(OneCycle, 9, **CYCLE, decay_mom_rate=0.01)[1]
    assert momenta[6:] == pytest.approx([0.9, 0.9 * 1.01, 0.9 * 1.02])


def test_a_momentum_that_grows_to_1_raises_and_nothing_is_set() -> None:
    optimizer = make_optimizer()
    schedule = OneCycle(optimizer, **CYCLE, decay_mom_rate=0.1)
    schedule.step(6)
    before = dict(optimizer.param_groups[0])
    assert before["betas"] == pytest.approx((0.99, 0.99))
    with pytest.raises(ValueError, match=r"after 8 updates decay_mom_rate 0\.1 raised betas\[0\] to 1\.08"):
        schedule.step(7)
    assert optimizer.param_groups[0] == before
    OneCycle(make_optimizer(zoptim.SGD), **CYCLE, decay_mom_rate=0.1, cycle_momentum=False).step(7)


def test_momentum_is_not_cycled_if_switched_off() -> None:
    assert set(curve(OneCycle, 5, **CYCLE, cycle_momentum=False)[1]) == {0.9}
    optimizer = make_optimizer()
    assert OneCycle(optimizer, **CYCLE, cycle_momentum=False).get_mom() is None
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_the_second_beta_is_deepspeeds_with_a_warning_or_the_optimizers() -> None:
    optimizer = make_optimizer()
    told = r"OneCycle sets betas\[1\] to 0\.99, as in DeepSpeed; the optimizer's value, 0\.999, has no effect"
    with pytest.warns(UserWarning, match=told):
        schedule = OneCycle(optimizer, **CYCLE)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    schedule.step()
    assert optimizer.param_groups[0]["betas"] == (*schedule.momenta(0), 0.99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OneCycle(make_optimizer(betas=(0.9, 0.99)), **CYCLE)
        exact = OneCycle(own := make_optimizer(), **CYCLE, exact_peak=True)
    exact.step()
    assert own.param_groups[0]["betas"] == (*exact.momenta(0), 0.999)
    assert exact.get_mom() == [own.param_groups[0]["betas"]]


def test_before_the_first_update_the_law_is_answered_and_the_minimum_is_set() -> None:
    schedule = OneCycle(optimizer := make_optimizer(), **CYCLE)
    assert schedule.get_mom() == [(0.9, 0.99)]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)


def test_every_limit_may_differ_by_group() -> None:
    limits = {"cycle_min_lr": [0.01, 0.1], "cycle_max_lr": [0.1, 0.5], "cycle_min_mom": [0.7, 0.5]}
    schedule = OneCycle(optimizer := make_optimizer(groups=2), **{**CYCLE, **limits})
    schedule.step(2)  # the peak
    assert schedule.get_lr() == [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert [group["betas"][0] for group in optimizer.param_groups] == pytest.approx([0.7, 0.5])


def test_an_error_leaves_the_optimizer_unchanged() -> None:
    for bad in ({"cycle_max_lr": [1, 2, 3]}, {"cycle_max_mom": [0.9, 2]}):
        optimizer = make_optimizer(groups=2)
        before = [dict(group) for group in optimizer.param_groups]
        with pytest.raises(ValueError, match="cycle_max_"):
            OneCycle(optimizer, **{**CYCLE, **bad})
        assert [{**group, "initial_lr": 0} for group in before] == [
            {**group, "initial_lr": 0} for group in optimizer.param_groups
        ]


def test_an_optimizer_without_betas_is_warned_about_and_its_lr_cycles() -> None:
    optimizer = make_optimizer(zoptim.SGD)
    with pytest.warns(UserWarning, match="SGD has no betas. Set cycle_momentum to false"):
        schedule = OneCycle(optimizer, **CYCLE)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.04)
    assert optimizer.param_groups[0]["momentum"] == 0.0


def test_a_step_runs_with_cycled_momentum() -> None:
    optimizer = make_optimizer()
    OneCycle(optimizer, **CYCLE)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"][0].item() == pytest.approx(1 - 0.8)


@pytest.mark.parametrize(
    ("cls", "params", "message"),
    [
        (
            OneCycle,
            {**CYCLE, "cycle_first_step_size": 0},
            r"cycle_first_step_size is 0; it must be a whole number >= 1",
        ),
        (OneCycle, {**CYCLE, "cycle_second_step_size": -1}, r"cycle_second_step_size is -1"),
        (OneCycle, {**CYCLE, "cycle_max_mom": [0.9, 0.8]}, r"cycle_max_mom has 2 values for 1 parameter groups"),
        (OneCycle, {**CYCLE, "cycle_first_stair_count": -1}, r"cycle_first_stair_count is -1"),
        (OneCycle, {**CYCLE, "cycle_max_lr": "0.1"}, r"cycle_max_lr is '0\.1' \(str\)"),
        (OneCycle, {**CYCLE, "cycle_min_mom": 1.0}, r"cycle_min_mom is 1\.0; it must be a number in \[0, 1\)"),
        (OneCycle, {**CYCLE, "decay_lr_rate": -0.5}, r"decay_lr_rate is -0\.5"),
        (OneCycle, {**CYCLE, "cycle_momentum": "no"}, r"cycle_momentum is 'no' \(str\); it must be True or False"),
        (LRRangeTest, {"lr_range_test_step_size": 0}, r"lr_range_test_step_size is 0"),
        (
            LRRangeTest,
            {"lr_range_test_min_lr": [0.1, 0.2]},
            r"lr_range_test_min_lr has 2 values for 1 parameter groups",
        ),
        (LRRangeTest, {"lr_range_test_staircase": 1}, r"lr_range_test_staircase is 1"),
    ],
)
def test_bad_parameters_are_named(cls: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cls(make_optimizer(), **params)
