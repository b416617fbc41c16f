"""`deepspeed.runtime.data_pipeline.curriculum_scheduler`: a schedule of difficulties, for loops of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zengine.config.keys.data import CurriculumLearning, ScheduleConfig
from zengine.config.plan.data_rules import schedule_of
from zengine.data.order.schedules import with_custom_functions

__all__ = ["CurriculumScheduler"]


class CurriculumScheduler:
    """The laws of `zengine.data`, with DeepSpeed's calls; a difficulty that has reached the maximum stays there.

    `config` has min_difficulty, max_difficulty, schedule_type and schedule_config, as `curriculum_learning` has.
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
        """The law at a step."""
        return self.schedule.at(global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Go to the difficulty of a step."""
        if self.current_difficulty < self.max_difficulty:
            self.current_difficulty = self.get_difficulty(global_steps)
        return self.current_difficulty

    def get_current_difficulty(self) -> int:
        """Return where `update_difficulty` has led."""
        return self.current_difficulty

    def set_current_difficulty(self, difficulty: int) -> None:
        """Go to a difficulty."""
        self.current_difficulty = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """The law of a schedule of the type "custom"."""
        self.schedule = with_custom_functions({"difficulty": self.schedule}, schedule_function)["difficulty"]

    def get_state(self) -> dict[str, Any]:
        """Return what `set_state` takes."""
        return {"current_difficulty": self.current_difficulty}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.current_difficulty = int(state["current_difficulty"])
