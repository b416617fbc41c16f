from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from zoptim.checks import check_adam, check_sgd, flag, integer, number, optional_flag

ADAM = {
    "lr": 0.1,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": True,
    "bias_correction": True,
    "fused": None,
    "foreach": None,
}
SGD = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": True,
    "maximize": False,
    "fused": None,
    "foreach": None,
}


def test_good_options_pass() -> None:
    check_adam(ADAM)
    check_sgd(SGD)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", -0.1, r"lr is -0\.1; it must be a number in \[0, inf\)"),
        ("lr", math.nan, r"lr is nan; it must be a number"),
        ("lr", math.inf, r"lr is inf; it must be a number"),
        ("lr", "1e-3", r"lr is '1e-3' \(str\); it must be a number in \[0, inf\)"),
        ("lr", None, r"lr is None"),
        ("lr", True, r"lr is True \(bool\)"),
        ("lr", torch.ones(2), r"lr is a tensor of shape \(2,\); it must have exactly one element"),
        ("lr", torch.tensor(-1.0), r"lr is -1\.0; it must be a number in \[0, inf\)"),
        ("betas", (0.9, 1.0), r"betas\[1\] is 1\.0; it must be a number in \[0, 1\)"),
        ("betas", (-0.1, 0.9), r"betas\[0\] is -0\.1; it must be a number in \[0, 1\)"),
        ("betas", 0.9, r"betas is 0\.9; it must be two numbers in \[0, 1\)"),
        ("betas", (0.9,), r"betas is \(0\.9,\); it must be two numbers"),
        ("betas", "ab", r"betas is 'ab'; it must be two numbers"),
        ("eps", -1e-8, r"eps is -1e-08"),
        ("weight_decay", -1, r"weight_decay is -1"),
        ("amsgrad", 1, r"amsgrad is 1 \(int\); it must be True or False"),
        ("bias_correction", None, r"bias_correction is None"),
        ("fused", "yes", r"fused is 'yes' \(str\); it must be True or False"),
    ],
)
def test_a_bad_option_of_adam_is_named_with_its_value_and_range(option: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check_adam({**ADAM, option: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr is -1\.0"),
        ({"momentum": -0.1}, r"momentum is -0\.1; it must be a number in \[0, inf\)"),
        ({"dampening": math.inf}, r"dampening is inf; it must be a number in \(-inf, inf\)"),
        ({"weight_decay": -0.1}, r"weight_decay is -0\.1"),
        ({"nesterov": 1}, r"nesterov is 1 \(int\)"),
        ({"momentum": 0.0}, r"nesterov=True with momentum 0\.0 and dampening 0\.0; Nesterov needs"),
        ({"dampening": 0.5}, r"nesterov=True with momentum 0\.9 and dampening 0\.5"),
        ({"fused": True, "foreach": True}, r"fused=True and foreach=True; choose one"),
    ],
)
def test_a_bad_option_of_sgd_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check_sgd({**SGD, **options})


def test_limits_themselves() -> None:
    check_adam({**ADAM, "lr": 0, "betas": [0.0, 0.0], "eps": 0, "weight_decay": 0})
    check_sgd({**SGD, "lr": torch.tensor([0.0]), "momentum": 1.5})


def test_whole_numbers_may_be_written_as_floats() -> None:
    assert integer("n", 1e3) == 1000
    assert type(integer("n", 1e3)) is int
    with pytest.raises(ValueError, match=r"n is 1\.5; it must be a whole number >= 0"):
        integer("n", 1.5)
    with pytest.raises(ValueError, match=r"n is 1; it must be a whole number >= 2"):
        integer("n", 1, 2)
    with pytest.raises(TypeError, match=r"n is 'auto' \(str\)"):
        integer("n", "auto")


def test_values_come_back_as_the_type_that_they_stand_for() -> None:
    assert type(number("x", 1)) is float
    assert flag("x", False) is False
    assert optional_flag("x", None) is None
