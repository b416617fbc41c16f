"""DeepSpeed's calls of a curriculum schedule."""

from __future__ import annotations

import pytest

from zengine.deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

SECTION = {"curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64}


def test_a_schedule_is_followed_up_to_its_maximum_and_stays() -> None:
    config = {"total_curriculum_step": 10, "difficulty_step": 8}
    scheduler = CurriculumScheduler({**SECTION, "schedule_type": "fixed_linear", "schedule_config": config})
    assert scheduler.get_current_difficulty() == 8
    assert [scheduler.update_difficulty(step) for step in (1, 2, 5, 10, 1)] == [8, 16, 32, 64, 64]
    scheduler.set_state({"current_difficulty": 16})
    assert scheduler.get_state() == {"current_difficulty": 16}
    scheduler.set_current_difficulty(24)
    assert scheduler.update_difficulty(2) == 16


def test_lists_and_functions_are_schedules_too() -> None:
    config = {"difficulty": [8, 64], "max_step": [5]}
    scheduler = CurriculumScheduler({**SECTION, "schedule_type": "fixed_discrete", "schedule_config": config})
    assert [scheduler.get_difficulty(step) for step in (5, 6)] == [8, 64]
    custom = CurriculumScheduler({**SECTION, "schedule_type": "custom"})
    custom.set_custom_get_difficulty(lambda step: 2 * step)
    assert custom.update_difficulty(7) == 14


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ValueError, match="schedule_type is missing"):
        CurriculumScheduler(SECTION)
