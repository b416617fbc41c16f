"""Optimizers and schedules are tried before the model exists."""

from __future__ import annotations

import inspect
import random
import re
import warnings
from string import ascii_lowercase
from typing import Any

import pytest

import zoptim
from zengine.config import ConfigError, load


def problems(**source: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(source)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    "source",
    [
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}}},
        {"optimizer": {"type": "adam", "params": {"adam_w_mode": False}}},
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}},
        {"optimizer": {"type": "RMSprop"}},
        {"optimizer": {"type": "Lion", "params": {"betas": [0.9, 0.99], "state_dtype": "8bit"}}},
        {"optimizer": {"type": "Lamb", "params": {"max_coeff": 10.0, "min_coeff": 0.01, "bias_correction": False}}},
        {"optimizer": {"type": "Muon", "params": {"momentum": 0.95, "adam_lr": 1e-3, "ns_method": "gram"}}},
        {"optimizer": {"type": "Adafactor", "params": {"eps": [None, 1e-3], "d": 1.0}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 20}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}},
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}}},
        {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}}},
        {
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "scheduler": {"type": "StepLR", "params": {"step_size": 1}},
        },
    ],
)
def test_what_can_be_built_is_accepted_without_a_warning(source: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(source).settings


def test_a_misspelt_name_is_reported_at_its_type() -> None:
    (problem,) = problems(optimizer={"type": "AdmaW"})
    assert problem.startswith("optimizer.type = \"AdmaW\": there is no optimizer 'AdmaW'. Did you mean 'AdamW'?")
    (problem,) = problems(scheduler={"type": "WarmupLr"})
    assert problem.startswith(
        "scheduler.type = \"WarmupLr\": there is no schedule 'WarmupLr'. Did you mean 'WarmupLR'?"
    )


def test_every_misspelt_option_is_reported_not_only_the_first() -> None:
    found = problems(
        optimizer={"type": "AdamW", "params": {"lrr": 0.1, "weight_deacy": 0.1}},
        scheduler={"type": "WarmupDecayLR", "params": {"total_num_step": 3}},
    )
    assert [problem.split("'?")[0] for problem in found] == [
        "optimizer.params.lrr = 0.1: AdamW has no option 'lrr'. Did you mean 'lr",
        "optimizer.params.weight_deacy = 0.1: AdamW has no option 'weight_deacy'. Did you mean 'weight_decay",
        "scheduler.params.total_num_step = 3: WarmupDecayLR has no option 'total_num_step'. Did you mean "
        "'total_num_steps",
    ]


@pytest.mark.parametrize("name", ["Adam", "adamw", "SGD", "adagrad", "Lamb", "LION", "muon", "Adafactor"])
def test_every_optimizer_of_ours_is_known_in_any_case_and_its_typos_are_told(name: str) -> None:
    assert load({"optimizer": {"type": name, "params": {"lr": 0.1}}}).settings
    (problem,) = problems(optimizer={"type": name, "params": {"weight_decya": 0.1}})
    assert "Did you mean 'weight_decay'?" in problem


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad", "Lamb", "Lion", "Muon"])
def test_the_state_format_is_checked_where_it_is_written(name: str) -> None:
    for state_dtype in ("fp32", "bf16", "8bit"):
        assert load({"optimizer": {"type": name, "params": {"state_dtype": state_dtype}}}).settings
    (problem,) = problems(optimizer={"type": name, "params": {"state_dtype": "4bit"}})
    assert problem.startswith("optimizer.params.state_dtype = \"4bit\": state_dtype is '4bit'; it must be ")


def test_an_optimizer_without_state_formats_says_so() -> None:
    (problem,) = problems(optimizer={"type": "RMSprop", "params": {"state_dtype": "8bit"}})
    assert problem.startswith(
        "optimizer.params.state_dtype = \"8bit\": torch.optim.RMSprop has no option 'state_dtype'"
    )


@pytest.mark.parametrize("name", ["Adam", "Lion", "Adagrad"])
def test_the_format_of_states_may_be_said_in_deepspeeds_spelling(name: str) -> None:
    assert load({"optimizer": {"type": name, "params": {"fp32_optimizer_states": False}}}).settings
    (problem,) = problems(optimizer={"type": name, "params": {"fp32_optimizer_states": False, "state_dtype": "8bit"}})
    assert "which contradict each other. Remove one" in problem


def test_what_the_engine_does_itself_is_refused_with_the_reason() -> None:
    (problem,) = problems(optimizer={"type": "AdamW", "params": {"lr": 0.1, "split_master": True}})
    assert problem.startswith("optimizer.params.split_master = true: the engine keeps float32 masters ")
    assert "Remove it" in problem
    assert load({"optimizer": {"type": "AdamW", "params": {"split_master": False}}}).settings
    (problem,) = problems(optimizer={"type": "RMSprop", "params": {"split_master": True}})
    assert "has no option" in problem


@pytest.mark.parametrize(
    ("params", "start"),
    [
        ({"lr": -1.0}, "optimizer.params.lr = -1.0: "),
        ({"lr": "0.1"}, 'optimizer.params.lr = "0.1": '),
        ({"betas": [0.9, 1.5]}, "optimizer.params.betas = [0.9, 1.5]: "),
        ({"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm = 1.0: "),
    ],
)
def test_a_value_out_of_range_is_reported_at_its_option(params: dict[str, Any], start: str) -> None:
    (problem,) = problems(optimizer={"type": "AdamW", "params": params})
    assert problem.startswith(start)


def test_a_missing_option_of_a_schedule_is_reported_at_its_params() -> None:
    (problem,) = problems(scheduler={"type": "WarmupDecayLR"})
    assert problem.startswith("scheduler.params: WarmupDecayLR needs total_num_steps")


def test_auto_options_are_sent_back() -> None:
    assert problems(optimizer={"type": "SGD", "params": {"momentum": "auto"}}) == [
        'optimizer.params.momentum = "auto": must be resolved by the integration that wrote it'
    ]


def test_params_without_a_type_are_refused() -> None:
    assert problems(optimizer={"params": {"lr": 0.1}}) == [
        "optimizer.params: given without optimizer.type, the name of what to build"
    ]


def test_places_of_options_are_kept() -> None:
    config = load('{"optimizer": {"type": "SGD",\n"params": {\n"lr": 0.1}}}')
    assert config.origin("optimizer.params.lr") == "<json>:3"


def test_no_random_number_is_drawn() -> None:
    import torch

    before = torch.random.get_rng_state()
    load({"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}})
    assert torch.equal(before, torch.random.get_rng_state())


def options_of(section: str, name: str) -> list[str]:
    """What the class behind a name of the config takes."""
    kind: Any = getattr(zoptim, {"Lamb": "LAMB"}.get(name, name))
    ours = {"params", "optimizer", "last_epoch", "use_muon", "decoupled_weight_decay", "split_master"}
    return [option for option in inspect.signature(kind).parameters if option not in ours]


@pytest.mark.parametrize(
    ("section", "name"),
    [("optimizer", name) for name in ("Adam", "AdamW", "SGD", "Adagrad", "Lamb", "Lion", "Muon", "Adafactor")]
    + [("scheduler", name) for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")],
)
def test_every_option_of_every_choice_is_recognised_when_it_is_misspelt(section: str, name: str) -> None:
    letters = random.Random(name)
    known = options_of(section, name)
    for option in known:
        at = letters.randrange(len(option))
        edit_distance = {
            option[:at] + option[at + 1 :],
            option[:at] + option[at] + option[at:],
            option[:at] + letters.choice(ascii_lowercase) + option[at + 1 :],
            option[:at] + option[at + 1 : at + 2] + option[at] + option[at + 2 :],
        }
        for slip in sorted(edit_distance - {"", *known}):
            told = problems(**{section: {"type": name, "params": {slip: 1}}})
            unknown = [problem for problem in told if problem.startswith(f"{section}.params.{slip} = 1: ")]
            assert len(unknown) == 1, (slip, told)
            assert re.search(rf"Did you mean .*\b{option}\b", unknown[0]), (option, unknown)
