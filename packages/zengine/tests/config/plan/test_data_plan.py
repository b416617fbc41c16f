"""The plan of the data sections."""

from __future__ import annotations

from zengine.config import DataPlan


def test_a_plan_that_is_empty_needs_nothing() -> None:
    assert DataPlan().needs_data == ""
