"""Facts are checked where they are made."""

from __future__ import annotations

import pytest

from zengine.config import Facts, TelemetryPlan


@pytest.mark.parametrize(("world_size", "replicas"), [(0, 0), (2, 0), (4, 3), (1, 2)])
def test_facts_that_contradict_each_other_are_refused(world_size: int, replicas: int) -> None:
    with pytest.raises(ValueError, match=rf"world_size={world_size}, replicas={replicas}.*must divide"):
        Facts(world_size=world_size, replicas=replicas)


def test_a_telemetry_plan_of_defaults_writes_nothing() -> None:
    plan = TelemetryPlan()
    assert [each.enabled for each in (plan.tensorboard, plan.csv_monitor, plan.wandb)] == [False] * 3
    assert (plan.steps_per_print, plan.is_wanted) == (0, False)
