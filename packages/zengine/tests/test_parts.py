"""The small parts: runners, schedule and optimizer identities, reports."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zengine
from zengine.parts import CastingRunner, ConstantRate, NoOptimizer, Sequential
from zprecision import FP16


class Echo(nn.Module):
    """Returns what it was given."""

    def forward(self, *args: object, **kwargs: object) -> object:
        return args, kwargs


def test_the_identity_runner_calls_the_module():
    assert Sequential().forward(Echo(), (1, "a"), {"b": 2}) == ((1, "a"), {"b": 2})


def test_the_casting_runner_casts_floating_inputs_only():
    (x, tokens), kwargs = CastingRunner(FP16).forward(
        Echo(), (torch.ones(2), torch.ones(2).long()), {"y": torch.ones(1)}
    )
    assert (x.dtype, tokens.dtype, kwargs["y"].dtype) == (torch.float16, torch.int64, torch.float16)


def test_an_engine_casts_inputs_when_the_config_asks_for_it():
    model = nn.Linear(2, 1)
    config = {"train_batch_size": 1, "fp16": {"enabled": True, "auto_cast": True}}
    assert zengine.initialize(model=model, config=config)[0](torch.ones(1, 2)).dtype == torch.float16


def test_the_constant_rate_has_no_state():
    schedule = ConstantRate()
    schedule.step(1, metric=2)
    schedule.load_state_dict(schedule.state_dict())
    assert schedule.state_dict() == {}


def test_no_optimizer_says_how_to_give_one():
    with pytest.raises(ValueError, match='add an "optimizer" section'):
        NoOptimizer().update(None, None, any_unused=False)
    assert NoOptimizer().lr() == ()
