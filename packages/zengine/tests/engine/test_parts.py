"""Small parts: identities of schedule and optimizer, reports."""

from __future__ import annotations

import pytest

from zengine.engine.parts import ConstantRate, NoOptimizer


def test_the_constant_rate_has_no_state():
    schedule = ConstantRate()
    schedule.step(1, metric=2)
    schedule.load_state_dict(schedule.state_dict())
    assert schedule.state_dict() == {}


def test_no_optimizer_says_how_to_give_one():
    with pytest.raises(ValueError, match='add an "optimizer" section'):
        NoOptimizer().update(None, None, any_unused=False)
    assert NoOptimizer().lr() == ()
