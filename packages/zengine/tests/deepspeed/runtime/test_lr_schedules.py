"""deepspeed.runtime.lr_schedules: command-line arguments, option names, and attributes of the schedules."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn

from zengine.deepspeed.runtime import lr_schedules
from zengine.deepspeed.runtime.lr_schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupLR,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    get_torch_optimizer,
    override_params,
    update_lr,
)


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_arguments_become_the_section_of_the_config():
    parser = add_tuning_arguments(argparse.ArgumentParser())
    found = parser.parse_args(["--lr_schedule", "WarmupLR", "--warmup_max_lr", "0.5"])
    params = {"warmup_min_lr": 0, "warmup_max_lr": 0.5, "warmup_num_steps": 1000, "warmup_type": "log"}
    assert get_config_from_args(found) == ({"type": "WarmupLR", "params": params}, None)  # as DeepSpeed 0.19.8
    cosine, _ = get_config_from_args(parser.parse_args(["--lr_schedule", "WarmupCosineLR"]))
    assert cosine is not None
    assert cosine["params"] == {
        "warmup_num_steps": 1000,
        "warmup_type": "log",
        "warmup_min_ratio": 0.01,
        "cos_min_ratio": 0.01,
    }
    everything: dict[str, object] = {}
    override_params(parser.parse_args(["--cycle_max_lr", "2", "--lr_range_test_staircase"]), everything)
    assert (everything["cycle_max_lr"], everything["lr_range_test_staircase"], len(everything)) == (2.0, True, 21)


@pytest.mark.parametrize(("given", "reason"), [([], "not specified"), (["--lr_schedule", "Cosine"], "Cosine is not")])
def test_no_section_without_a_schedule(given, reason):
    config, text = get_config_from_args(add_tuning_arguments(argparse.ArgumentParser()).parse_args(given))
    assert config is None
    assert reason in str(text)


@pytest.mark.parametrize(
    ("config", "rate"),
    [
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}, 0.5),
        ({"type": "OneCycle", "params": {"cycle_max_lr": 0.25}}, 0.25),
        ({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.125}}, 0.125),
        ({"type": "WarmupCosineLR", "params": {}}, None),
        ({"type": "Cosine", "params": {}}, None),
        ({"type": "WarmupLR"}, None),
        ({"params": {}}, None),
    ],
)
def test_the_rate_of_a_section(config, rate):
    found, reason = get_lr_from_config(config)
    assert found == rate
    assert bool(reason) == (rate is None)


def test_schedules_show_their_options(optimizer):
    warmup = WarmupLR(optimizer, 0.0, 0.2, 4, "linear")
    assert (warmup.min_lrs, warmup.max_lrs, warmup.delta_lrs, warmup.warmup_num_steps) == ([0.0], [0.2], [0.2], 4)
    cycle = OneCycle(optimizer, 0.01, 0.1, cycle_first_step_size=4, cycle_second_step_size=12, cycle_momentum=False)
    assert (cycle.min_lrs, cycle.max_lrs, cycle.total_size, cycle.step_ratio) == ([0.01], [0.1], 16, 0.25)
    assert (cycle.first_step_size, cycle.second_step_size) == (4, 12)
    test = LRRangeTest(optimizer, 0.01, 3, 2.0, True)
    assert (test.min_lr, test.step_size, test.step_rate, test.staircase) == ([0.01], 3, 2.0, True)


def test_the_cosine_shows_its_ratio():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    cosine = WarmupCosineLR(optimizer, 10, warmup_num_steps=4, warmup_type="linear")
    assert (cosine.org_lrs, cosine.get_lr_ratio()) == ([0.5], 0.0)
    cosine.step(2)
    assert (cosine.get_lr_ratio(), cosine.get_lr()) == (0.5, [0.25])


def test_rates_are_set_in_numbers_and_tensors(optimizer):
    rates = update_lr([optimizer.param_groups[0], {"lr": torch.tensor(0.0)}], [0.5, 0.25])
    assert rates == [0.5, torch.tensor(0.25)]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert get_torch_optimizer(argparse.Namespace(optimizer=optimizer)) is optimizer
    with pytest.raises(TypeError, match="Namespace is not a subclass"):
        get_torch_optimizer(argparse.Namespace())


def test_option_names_are_those_of_the_config(optimizer):
    options = {lr_schedules.WARMUP_MIN_LR: 0.1, lr_schedules.WARMUP_MAX_LR: 0.2, lr_schedules.WARMUP_NUM_STEPS: 5}
    assert WarmupLR(optimizer, **options, warmup_type=lr_schedules.WARMUP_LINEAR_RATE).min_lrs == [0.1]
