from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from zoptim.checks import flag, integer, number, optional_flag
from zoptim.optimizers.adagrad import check_adagrad
from zoptim.optimizers.adam import check_adam
from zoptim.optimizers.lamb import check_lamb
from zoptim.optimizers.lion import check_lion
from zoptim.optimizers.sgd import check_sgd

Check = Callable[[Mapping[str, Any]], None]

COMMON = {
    "lr": 0.1,
    "weight_decay": 0.0,
    "maximize": False,
    "fused": None,
    "foreach": None,
    "state_dtype": None,
    "split_master": False,
}
ADAM = {
    **COMMON,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "amsgrad": False,
    "decoupled_weight_decay": True,
    "bias_correction": True,
}
SGD = {**COMMON, "momentum": 0.9, "dampening": 0.0, "nesterov": True}
LION = {**COMMON, "betas": (0.9, 0.99)}
ADAGRAD = {**COMMON, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-10}
LAMB = {
    **COMMON,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "bias_correction": True,
    "eps_inside_sqrt": False,
    "min_coeff": 0.01,
    "max_coeff": 10.0,
}
EVERY = [(check_adam, ADAM), (check_sgd, SGD), (check_lion, LION), (check_adagrad, ADAGRAD), (check_lamb, LAMB)]
every = pytest.mark.parametrize(("check", "good"), EVERY, ids=["adam", "sgd", "lion", "adagrad", "lamb"])


@every
def test_good_options_pass(check: Check, good: dict[str, Any]) -> None:
    check(good)


@every
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", -0.1, r"lr is -0\.1; it must be a number in \[0, inf\)"),
        ("weight_decay", -1, r"weight_decay is -1; it must be a number in \[0, inf\)"),
        ("maximize", 1, r"maximize is 1 \(int\); it must be True or False"),
        ("split_master", None, r"split_master is None \(NoneType\); it must be True or False"),
        ("state_dtype", "bf17", r"state_dtype is 'bf17'; it must be None .*\"bf16\".*\"8bit\""),
        ("state_dtype", torch.float64, r"state_dtype is torch\.float64; it must be None"),
        ("fused", "yes", r"fused is 'yes' \(str\); it must be True or False"),
        ("foreach", 0, r"foreach is 0 \(int\); it must be True or False"),
    ],
)
def test_shared_options_are_checked_in_every_optimizer(
    check: Check, good: dict[str, Any], option: str, value: Any, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check({**good, option: value})


@every
@pytest.mark.parametrize("value", ["fp32", "BF16", "8bit", torch.bfloat16, torch.float32, "float32", None])
def test_a_state_dtype_may_be_a_name_or_a_dtype(check: Check, good: dict[str, Any], value: Any) -> None:
    check({**good, "state_dtype": value})


@every
def test_fused_and_foreach_exclude_each_other(check: Check, good: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"fused=True and foreach=True; choose one, or leave both None"):
        check({**good, "fused": True, "foreach": True})


@pytest.mark.parametrize(
    ("check", "good", "options", "message"),
    [
        (check_lion, LION, {"betas": (0.9, 1)}, r"betas\[1\] is 1; it must be a number in \[0, 1\)"),
        (check_lion, LION, {"betas": None}, r"betas is None; it must be two numbers"),
        (check_adagrad, ADAGRAD, {"lr_decay": -0.1}, r"lr_decay is -0\.1; it must be a number in \[0, inf\)"),
        (check_adagrad, ADAGRAD, {"initial_accumulator_value": -1.0}, r"initial_accumulator_value is -1\.0"),
        (check_adagrad, ADAGRAD, {"eps": math.nan}, r"eps is nan; it must be a number"),
        (check_lamb, LAMB, {"betas": (1.0, 0.9)}, r"betas\[0\] is 1\.0"),
        (check_lamb, LAMB, {"eps": "1e-6"}, r"eps is '1e-6' \(str\)"),
        (check_lamb, LAMB, {"bias_correction": 1}, r"bias_correction is 1 \(int\)"),
        (check_lamb, LAMB, {"eps_inside_sqrt": None}, r"eps_inside_sqrt is None"),
        (check_lamb, LAMB, {"state_dtype": torch.float16}, r"state_dtype is fp16; LAMB accepts fp32, bf16 and 8bit"),
        (check_lamb, LAMB, {"min_coeff": -0.1}, r"min_coeff is -0\.1; it must be a number in \[0, inf\)"),
        (check_lamb, LAMB, {"max_coeff": math.inf}, r"max_coeff is inf; it must be a number in \[0, inf\)"),
        (
            check_lamb,
            LAMB,
            {"min_coeff": 2.0, "max_coeff": 1.0},
            r"max_coeff is 1\.0; it must be at least min_coeff, 2",
        ),
    ],
)
def test_own_options_are_checked(check: Check, good: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check({**good, **options})


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
    check_lamb({**LAMB, "min_coeff": 1.0, "max_coeff": 1.0, "eps": 0})
    check_adagrad({**ADAGRAD, "lr_decay": 0, "initial_accumulator_value": 0})


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
