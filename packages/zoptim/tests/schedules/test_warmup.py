from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import zoptim
from zoptim import WarmupCosineLR, WarmupDecayLR, WarmupLR


def make_optimizer(*lrs: float) -> torch.optim.Optimizer:
    return zoptim.SGD([{"params": [torch.ones(2, requires_grad=True)], "lr": lr} for lr in lrs or (0.01,)])


def curve(cls: Any, count: int, **params: Any) -> list[float]:
    """The lr of the first group before the first step(), and after steps 1, 2, ..."""
    optimizer = make_optimizer()
    schedule = cls(optimizer, **params)
    values = []
    for _ in range(count):
        values.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return values


# Golden values of DeepSpeed: group lr 0.01, 4 warm-up steps, 8 in all, maximum 0.1.


@pytest.mark.parametrize(
    ("kind", "golden"),
    [("log", [0, 0, 0.05, 0.079248, 0.1, 0.1, 0.1]), ("linear", [0, 0, 0.025, 0.05, 0.075, 0.1, 0.1])],
)
def test_warmup_golden_values(kind: str, golden: list[float]) -> None:
    found = curve(WarmupLR, 7, warmup_max_lr=0.1, warmup_num_steps=4, warmup_type=kind)
    assert found == pytest.approx(golden, abs=5e-7)


def test_warmup_decay_golden_values() -> None:
    params = {"total_num_steps": 8, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}
    golden = [0, 0, 0.025, 0.05, 0.075, 0.1, 0.075, 0.05, 0.025, 0]
    assert curve(WarmupDecayLR, 10, **params) == pytest.approx(golden, abs=5e-7)


def test_warmup_cosine_golden_values() -> None:
    golden = [0, 0, 0.0025, 0.005, 0.0075, 0.008536, 0.005, 0.001465, 1e-6, 1e-6]
    found = curve(WarmupCosineLR, 10, total_num_steps=8, warmup_num_steps=4, warmup_type="linear")
    assert found == pytest.approx(golden, abs=5e-7)


def test_exact_peak_wastes_no_update_and_reaches_the_peak() -> None:
    linear: dict[str, Any] = {"warmup_num_steps": 4, "warmup_type": "linear", "exact_peak": True}
    assert curve(WarmupLR, 6, warmup_max_lr=0.1, **linear) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])
    found = curve(WarmupDecayLR, 10, total_num_steps=8, warmup_max_lr=0.1, **linear)
    assert found == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.08, 0.06, 0.04, 0.02, 0, 0])
    found = curve(WarmupCosineLR, 9, total_num_steps=8, **linear)
    assert found[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert found[4:] == pytest.approx([0.00853568035, 0.0050005, 0.00146531965, 1e-6, 1e-6], rel=1e-6)


def test_a_warmup_of_fewer_than_two_steps_counts_as_two_unless_exact() -> None:
    for steps in (0, 1, 2):
        assert curve(WarmupLR, 4, warmup_max_lr=0.1, warmup_num_steps=steps) == pytest.approx([0, 0, 0.1, 0.1])
        exact = curve(WarmupLR, 2, warmup_max_lr=0.1, warmup_num_steps=steps, warmup_type="linear", exact_peak=True)
        assert exact == pytest.approx([0.05 if steps == 2 else 0.1, 0.1])


def test_the_maximum_is_each_groups_own_rate_unless_given() -> None:
    optimizer = make_optimizer(0.5, 0.25)
    schedule = WarmupLR(optimizer, warmup_num_steps=2)
    schedule.step(10)
    assert schedule.get_lr() == [0.5, 0.25]
    decay = WarmupDecayLR(make_optimizer(0.5, 0.25), 1000, warmup_max_lr=None, warmup_num_steps=2)
    decay.step(2)
    assert decay.get_lr() == [0.5, 0.25]


def test_decay_warns_that_deepspeeds_maximum_overrides_the_optimizers_lr() -> None:
    told = r"no warmup_max_lr and rises to 0\.001, as in DeepSpeed; the optimizer's lr, 0\.5, 0\.25, has no effect"
    with pytest.warns(UserWarning, match=told):
        decay = WarmupDecayLR(make_optimizer(0.5, 0.001, 0.25), 1000, warmup_num_steps=2)
    decay.step(2)
    assert decay.get_lr() == [0.001] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WarmupDecayLR(make_optimizer(0.001), 1000, warmup_num_steps=2)
        WarmupDecayLR(make_optimizer(0.5), 1000, warmup_max_lr=0.001, warmup_num_steps=2)


def test_limits_may_differ_by_group() -> None:
    schedule = WarmupLR(make_optimizer(0.5, 0.25), [0.1, 0.2], [0.3, 0.6], 10, "linear")
    assert schedule.get_lr() == [0.1, 0.2]
    schedule.step(5)
    assert schedule.get_lr() == pytest.approx([0.2, 0.4])


def test_the_cosine_scales_each_groups_own_rate_from_the_least_ratio() -> None:
    schedule = WarmupCosineLR(make_optimizer(0.5, 0.25), 20, warmup_min_ratio=0.2, warmup_num_steps=10)
    assert schedule.get_lr() == [0.0, 0.0], "as in DeepSpeed: the least ratio holds from the first step() on"
    schedule.step()
    assert schedule.get_lr() == pytest.approx([0.1, 0.05])
    schedule.step(9)
    assert schedule.get_lr() == pytest.approx([0.5, 0.25])


@pytest.mark.filterwarnings("ignore:WarmupDecayLR was given no")
@pytest.mark.parametrize("cls", [WarmupDecayLR, WarmupCosineLR])
def test_a_total_below_the_warmup_warns(cls: Any) -> None:
    with pytest.warns(UserWarning, match="total_num_steps 5 is less than warmup_num_steps 10"):
        cls(make_optimizer(), total_num_steps=5, warmup_num_steps=10)


@pytest.mark.parametrize(
    ("cls", "params", "message"),
    [
        (WarmupLR, {"warmup_num_steps": -1}, r"warmup_num_steps is -1; it must be a whole number >= 0"),
        (WarmupLR, {"warmup_num_steps": "auto"}, r"warmup_num_steps is 'auto' \(str\)"),
        (WarmupLR, {"warmup_type": "linaer"}, r"warmup_type is 'linaer'\. Did you mean 'linear'\? Allowed: 'log'"),
        (WarmupLR, {"warmup_max_lr": -0.1}, r"warmup_max_lr is -0\.1; it must be a number in \[0, inf\)"),
        (WarmupLR, {"warmup_max_lr": [0.1, 0.2]}, r"warmup_max_lr has 2 values for 1 parameter groups"),
        (WarmupLR, {"warmup_min_lr": ["x"]}, r"warmup_min_lr\[0\] is 'x' \(str\)"),
        (WarmupLR, {"exact_peak": 1}, r"exact_peak is 1 \(int\); it must be True or False"),
        (WarmupDecayLR, {"total_num_steps": 0}, r"total_num_steps is 0; it must be a whole number >= 1"),
        (WarmupCosineLR, {"total_num_steps": 9000, "cos_min_ratio": -1}, r"cos_min_ratio is -1"),
        (WarmupCosineLR, {"total_num_steps": 9000, "warmup_min_ratio": None}, r"warmup_min_ratio is None"),
    ],
)
def test_bad_parameters_are_named(cls: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cls(make_optimizer(), **params)
