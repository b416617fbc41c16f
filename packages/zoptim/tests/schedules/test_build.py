from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import zoptim
from zoptim import UnknownNameError, make_schedule

OWN: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_num_steps": 4, "warmup_max_lr": 0.1},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 4, "exact_peak": True},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1},
    "LRRangeTest": {},
}
TORCH: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 3]},
    "ConstantLR": {},
    "LinearLR": {"total_iters": 4},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 10},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "cycle_momentum": False},
    "ReduceLROnPlateau": {"patience": 2},
    "LambdaLR": {"lr_lambda": lambda epoch: 0.5**epoch},
}


def make_optimizer() -> torch.optim.Optimizer:
    return zoptim.AdamW([torch.ones(2, requires_grad=True)], lr=0.01)


@pytest.mark.filterwarnings("ignore:OneCycle sets betas")
@pytest.mark.parametrize("name", OWN)
def test_our_own_schedules_are_built_by_name(name: str) -> None:
    schedule = make_schedule(name, make_optimizer(), OWN[name])
    assert type(schedule) is getattr(zoptim, name)
    schedule.step()
    assert len(schedule.get_last_lr()) == 1


def test_a_missing_maximum_in_a_config_warns() -> None:
    with pytest.warns(UserWarning, match="WarmupDecayLR was given no warmup_max_lr and rises to 0.001"):
        make_schedule("WarmupDecayLR", make_optimizer(), {"total_num_steps": 8, "warmup_num_steps": 4})


@pytest.mark.parametrize("name", TORCH)
def test_torch_schedulers_are_returned_unwrapped(name: str) -> None:
    optimizer = make_optimizer()
    schedule = make_schedule(name, optimizer, TORCH[name])
    assert type(schedule) is getattr(lr_scheduler, name)
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones(2)
    optimizer.step()
    schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))


def test_composed_torch_schedulers_take_their_parts() -> None:
    optimizer = make_optimizer()
    parts = [make_schedule(name, optimizer, TORCH[name]) for name in ("LinearLR", "ExponentialLR")]
    sequential = make_schedule("SequentialLR", optimizer, {"schedulers": parts, "milestones": [4]})
    chained = make_schedule("ChainedScheduler", optimizer, {"schedulers": parts})
    assert type(sequential) is lr_scheduler.SequentialLR
    assert type(chained) is lr_scheduler.ChainedScheduler


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("WarmupRL", "WarmupLR"), ("onecycle", "OneCycle"), ("CosineAnealingLR", "CosineAnnealingLR")],
)
def test_an_unknown_schedule_raises_with_the_nearest_one_and_the_list(name: str, nearest: str) -> None:
    with pytest.raises(
        UnknownNameError, match=rf"no schedule '{name}'\. Did you mean '{nearest}'\? Allowed: WarmupLR"
    ):
        make_schedule(name, make_optimizer())


@pytest.mark.parametrize("name", ["LRScheduler", "_LRScheduler", "Optimizer"])
def test_base_classes_are_no_schedules(name: str) -> None:
    with pytest.raises(UnknownNameError, match="there is no schedule"):
        make_schedule(name, make_optimizer())


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "WarmupLR",
            {"warmup_steps": 4},
            r"WarmupLR has no option 'warmup_steps'\. Did you mean 'warmup_num_steps'\?",
        ),
        ("OneCycle", {**OWN["OneCycle"], "cycle_min_mon": 0.1}, r"Did you mean 'cycle_min_mom'\?"),
        ("StepLR", {"stepsize": 4}, r"StepLR has no option 'stepsize'\. Did you mean 'step_size'\?"),
        ("WarmupLR", {"optimizer": 1}, r"WarmupLR has no option 'optimizer'"),
    ],
)
def test_an_unknown_parameter_raises_with_the_nearest_one(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        make_schedule(name, make_optimizer(), params)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "WarmupDecayLR",
            {"warmup_num_steps": 4},
            r"WarmupDecayLR needs total_num_steps; it was given warmup_num_steps",
        ),
        ("OneCycle", {}, r"OneCycle needs cycle_min_lr, cycle_max_lr; it was given nothing"),
        ("StepLR", {}, r"StepLR needs step_size"),
    ],
)
def test_a_missing_parameter_is_named(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(name, make_optimizer(), params)


def test_a_name_that_is_no_string_raises() -> None:
    with pytest.raises(TypeError, match="schedule's name is 3; it must be a string"):
        make_schedule(3, make_optimizer())  # type: ignore[arg-type]
