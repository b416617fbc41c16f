from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import UnknownNameError, make_optimizer


def make_params() -> list[Tensor]:
    return [torch.ones(4, requires_grad=True)]


def make(name: str, **options: Any) -> torch.optim.Optimizer:
    return make_optimizer(name, make_params(), options)


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("Adam", zoptim.AdamW),
        ("adam", zoptim.AdamW),
        ("AdamW", zoptim.AdamW),
        ("ADAMW", zoptim.AdamW),
        ("sgd", zoptim.SGD),
        ("SGD", zoptim.SGD),
        ("Adagrad", zoptim.Adagrad),
        ("adagrad", zoptim.Adagrad),
        ("Lamb", zoptim.LAMB),
        ("LAMB", zoptim.LAMB),
        ("Lion", zoptim.Lion),
        ("lion", zoptim.Lion),
        ("Muon", zoptim.Muon),
        ("muon", zoptim.Muon),
        ("Adafactor", zoptim.Adafactor),
        ("adafactor", zoptim.Adafactor),
        ("RMSprop", torch.optim.RMSprop),
        ("NAdam", torch.optim.NAdam),
    ],
)
def test_names_build_these_classes(name: str, cls: type) -> None:
    assert type(make(name, lr=0.01)) is cls


def test_adam_decouples_the_decay_unless_adam_w_mode_is_false() -> None:
    assert make("Adam").param_groups[0]["decoupled_weight_decay"] is True
    coupled = make("Adam", adam_w_mode=False)
    assert type(coupled) is zoptim.Adam
    assert coupled.param_groups[0]["decoupled_weight_decay"] is False


@pytest.mark.parametrize(("torch_adam", "cls"), [(False, zoptim.AdamW), (True, torch.optim.AdamW)])
def test_adamw_decouples_the_decay_whatever_adam_w_mode_says(torch_adam: bool, cls: type) -> None:
    """DeepSpeed's rule: the name "AdamW" wins."""
    for mode in (False, True):
        assert type(make("AdamW", adam_w_mode=mode, torch_adam=torch_adam)) is cls


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("torch_adam", [False, True])
def test_defaults_are_those_of_deepspeed(name: str, torch_adam: bool) -> None:
    group = make(name, torch_adam=torch_adam).param_groups[0]
    found = tuple(group[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad"))
    assert found == (1e-3, (0.9, 0.999), 1e-8, 0.0, False)


def test_every_option_reaches_the_optimizer() -> None:
    options = {
        "lr": 0.02,
        "betas": [0.8, 0.9],
        "eps": 1e-6,
        "weight_decay": 0.1,
        "bias_correction": False,
        "amsgrad": True,
        "foreach": True,
        "fused": False,
        "maximize": True,
    }
    optimizer = make_optimizer("Adam", make_params(), {**options, "fp32_optimizer_states": True, "torch_adam": False})
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in options} == {**options, "betas": (0.8, 0.9)}
    assert options["betas"] == [0.8, 0.9], "the config is left as it was"
    sgd = make("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1).param_groups[0]
    assert (sgd["momentum"], sgd["nesterov"], sgd["weight_decay"]) == (0.9, True, 0.1)


def test_torch_adam_selects_torchs_classes() -> None:
    assert type(make("Adam", torch_adam=True)) is torch.optim.AdamW
    assert type(make("Adam", torch_adam=True, adam_w_mode=False)) is torch.optim.Adam
    assert type(make("AdamW", torch_adam=True, fused=True)) is torch.optim.AdamW


def test_groups_and_generators_are_accepted_as_in_torch() -> None:
    groups = [{"params": make_params(), "lr": 0.5}, {"params": make_params()}]
    optimizer = make_optimizer("AdamW", groups, {"lr": 0.1})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert make_optimizer("SGD", iter(make_params())).param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Adam", {"max_grad_norm": 1.0}, r"Adam was given max_grad_norm=1\.0;.*set gradient_clipping"),
        ("RMSprop", {"max_grad_norm": 1.0}, r"set gradient_clipping"),
        (
            "Adam",
            {"torch_adam": True, "bias_correction": False},
            r"torch_adam=True and bias_correction=False, an option that torch's Adam lacks",
        ),
        (
            "Adam",
            {"torch_adam": True, "state_dtype": "bf16"},
            r"torch_adam=True and state_dtype='bf16'.*supports state_dtype",
        ),
        ("Adam", {"torch_adam": True, "split_master": True}, r"torch_adam=True and split_master=True"),
        (
            "AdamW",
            {"fp32_optimizer_states": False, "state_dtype": "8bit"},
            r"fp32_optimizer_states=False and state_dtype='8bit', which contradict each other\. Remove one",
        ),
        (
            "Lion",
            {"fp32_optimizer_states": True, "state_dtype": "bf16"},
            r"Lion was given fp32_optimizer_states=True and state_dtype='bf16', which contradict each other",
        ),
        (
            "AdamW",
            {"fp32_optimizer_states": "no"},
            r"fp32_optimizer_states is 'no' \(str\); it must be True or False",
        ),
        ("SGD", {"state_dtype": "bf8"}, r"state_dtype is 'bf8'; it must be None"),
        ("Adam", {"torch_adam": "true"}, r"torch_adam is 'true' \(str\); it must be True or False"),
        ("AdamW", {"lr": "auto"}, r"lr is 'auto' \(str\); it must be a number"),
        ("AdamW", {"betas": [0.9, 2]}, r"betas\[1\] is 2"),
    ],
)
def test_bad_options_raise_with_what_to_do(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make(name, **options)


@pytest.mark.parametrize(
    ("name", "option", "nearest"),
    [
        ("Adam", "weigth_decay", "weight_decay"),
        ("AdamW", "adamw_mode", "adam_w_mode"),
        ("SGD", "momentun", "momentum"),
        ("Adagrad", "lr_decai", "lr_decay"),
        ("Lamb", "min_coef", "min_coeff"),
        ("Lion", "beta", "betas"),
        ("AdamW", "state_dtyp", "state_dtype"),
        ("RMSprop", "alhpa", "alpha"),
    ],
)
def test_an_unknown_option_raises_with_the_nearest_one(name: str, option: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"{name} has no option '{option}'\. Did you mean '{nearest}'\?"):
        make(name, **{option: 0.1})


@pytest.mark.parametrize(
    ("name", "nearest"), [("AdamX", "Adam"), ("rmsprop", "RMSprop"), ("Adamaxx", "Adamax"), ("sgdd", "SGD")]
)
def test_an_unknown_optimizer_raises_with_the_nearest_one_and_the_list(name: str, nearest: str) -> None:
    with pytest.raises(
        UnknownNameError, match=rf"no optimizer '{name}'\. Did you mean '{nearest}.*'\? Allowed: Adam, "
    ):
        make(name)


def test_the_list_of_allowed_names_has_no_base_class_and_no_unavailable_names() -> None:
    with pytest.raises(UnknownNameError) as caught:
        make("Optimizer")
    listed = str(caught.value).partition("Allowed:")[2]
    assert listed.startswith(
        " Adam, AdamW, SGD, Adagrad, LAMB, Lion, Muon, Adafactor, OneBitAdam, ZeroOneAdam, OneBitLamb, "
        "MuAdam, MuAdamW, MuSGD in any case;"
    )
    assert "NAdam" in listed
    assert "Optimizer" not in listed
    assert listed.count("Adagrad") == listed.count("Muon") == 1, "ours hide torch's"


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Lion", "Adagrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deepspeeds_switch_for_float32_states(name: str, dtype: torch.dtype) -> None:
    """True is float32 for any weights, False is the parameter's dtype."""
    for switch, wanted in ((True, torch.float32), (False, dtype)):
        param = torch.ones(300, dtype=dtype, requires_grad=True)
        optimizer = make_optimizer(name, [param], {"fp32_optimizer_states": switch})
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert {v.dtype for key, v in optimizer.state[param].items() if key != "step"} == {wanted}


@pytest.mark.parametrize("name", ["Adam", "Lion"])
def test_the_switch_and_an_equal_format_are_accepted(name: str) -> None:
    for switch, state_dtype in ((True, "fp32"), (False, "bf16")):
        made = make(name, fp32_optimizer_states=switch, state_dtype=state_dtype)
        assert made.param_groups[0]["state_dtype"] == state_dtype
    assert make(name, fp32_optimizer_states=False).param_groups[0]["state_dtype"] is None


def test_torchs_adam_ignores_the_switch() -> None:
    """As in DeepSpeed, whose switch applies to its own class only."""
    for switch in (True, False):
        assert type(make("Adam", torch_adam=True, fp32_optimizer_states=switch)) is torch.optim.AdamW


def test_lion_has_the_defaults_of_deepspeed_for_missing_options() -> None:
    group = make("Lion").param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 0.0)
    assert make("Lion", betas=[0.9, 0.95]).param_groups[0]["betas"] == (0.9, 0.95)


def test_lamb_has_the_defaults_of_deepspeed() -> None:
    group = make("Lamb").param_groups[0]
    found = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "max_coeff", "min_coeff")}
    wanted = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
    }
    assert found == wanted
    assert (group["bias_correction"], group["eps_inside_sqrt"]) == (True, False)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad", "Lamb", "Lion"])
def test_state_formats_are_options_like_any_other(name: str) -> None:
    group = make(name, state_dtype="8bit").param_groups[0]
    assert (group["state_dtype"], group["split_master"]) == ("8bit", False)


def test_a_name_that_is_no_string_raises() -> None:
    with pytest.raises(TypeError, match="optimizer's name is None; it must be a string"):
        make_optimizer(None, make_params())  # type: ignore[arg-type]
