"""`deepspeed.runtime.data_pipeline.curriculum_scheduler`: a difficulty schedule for custom loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zengine.config.keys.data import CurriculumLearning, ScheduleConfig
from zengine.config.plan.data_rules import schedule_of
from zengine.data.order.schedules import with_custom_functions

__all__ = ["CurriculumScheduler"]


class CurriculumScheduler:
    """Schedule of `zengine.data` with DeepSpeed's methods; a difficulty that has reached the maximum stays there.

    `config` has the keys of `curriculum_learning`: min_difficulty, max_difficulty, schedule_type, schedule_config.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        details: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in dict(config.get("schedule_config") or {}).items()
        }
        names = ("min_difficulty", "max_difficulty", "schedule_type")
        section = CurriculumLearning(
            **{name: config[name] for name in names if name in config}, schedule_config=ScheduleConfig(**details)
        )
        self.schedule = schedule_of(section)
        self.max_difficulty = section.max_difficulty
        self.current_difficulty = section.min_difficulty

    def get_difficulty(self, global_steps: int) -> int:
        """Return the scheduled difficulty of a step."""
        return self.schedule.at(global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Set and return the difficulty of a step."""
        if self.current_difficulty < self.max_difficulty:
            self.current_difficulty = self.get_difficulty(global_steps)
        return self.current_difficulty

    def get_current_difficulty(self) -> int:
        """Return the current difficulty."""
        return self.current_difficulty

    def set_current_difficulty(self, difficulty: int) -> None:
        """Set the current difficulty."""
        self.current_difficulty = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """Set the function of a schedule of type "custom"."""
        self.schedule = with_custom_functions({"difficulty": self.schedule}, schedule_function)["difficulty"]

    def get_state(self) -> dict[str, Any]:
        """Return the state for `set_state`."""
        return {"current_difficulty": self.current_difficulty}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.current_difficulty = int(state["current_difficulty"])
