"""Difficulty schedules: pure functions of the step, one frozen value each.

    FixedRoot(low=8, high=64, steps=100, multiple=8).at(50)    # 32: the schedule of fixed_linear (degree 1)

A difficulty is any limit of a curriculum: tokens of a sequence, a percentile, tokens that a layer sees.  It depends
on the step alone, so there is nothing to save, and a resumed run continues at the step counter.

The formulas equal DeepSpeed's exactly, oddities included: rounding down to a multiple may give less than `low`, even
0, and a `high` that is no multiple is reached a little after `steps`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from typing import Protocol, final

import attrs


class Schedule(Protocol):
    """Difficulty of every step."""

    @property
    def high(self) -> int: ...  # the greatest difficulty

    def at(self, step: int) -> int: ...


@final
@attrs.frozen(kw_only=True)
class FixedRoot:
    """d = floor((t/T)^(1/r) * (high - low) + low), down to a multiple, at most `high`; r = 1 is fixed_linear."""

    low: int  # at step 0
    high: int  # at the end
    steps: int  # T: steps of the curriculum
    multiple: int = 1  # what d is rounded down to
    degree: float = 1.0  # r: 2 grows fast first and slowly then

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"a schedule grows from its minimum to its maximum, got {self.low} and {self.high}")
        if self.steps < 1 or self.multiple < 1 or self.degree <= 0:
            raise ValueError(
                f"steps ({self.steps}) and multiple ({self.multiple}) must be at least 1, and degree "
                f"({self.degree:g}) above 0"
            )

    def at(self, step: int) -> int:
        """Return the difficulty at `step` (>= 0)."""
        share: float = (step / self.steps) ** (1.0 / self.degree)
        exact = math.floor(share * (self.high - self.low) + self.low)
        return min(exact - exact % self.multiple, self.high)


@final
@attrs.frozen(kw_only=True)
class FixedDiscrete:
    """`difficulties[i]` up to and including step `until[i]`, then the last one."""

    difficulties: tuple[int, ...]
    until: tuple[int, ...]  # one less than difficulties, increasing

    def __attrs_post_init__(self) -> None:
        if not self.difficulties or len(self.until) != len(self.difficulties) - 1:
            raise ValueError(
                f"every difficulty but the last has a last step: {len(self.difficulties)} difficulties need "
                f"{max(len(self.difficulties) - 1, 0)} steps, got {len(self.until)}"
            )
        if any(value < 0 for value in self.difficulties) or list(self.until) != sorted(set(self.until)):
            raise ValueError(
                f"difficulties must be at least 0 and their last steps increase, got {list(self.difficulties)} and "
                f"{list(self.until)}"
            )

    @property
    def high(self) -> int:
        return max(self.difficulties)

    def at(self, step: int) -> int:
        """Return the difficulty at `step`."""
        return self.difficulties[bisect.bisect_left(self.until, step)]


@final
@attrs.frozen(kw_only=True)
class Custom:
    """Schedule of the caller (step -> difficulty), truncated to an integer and clamped to 0..`high`."""

    low: int
    high: int
    law: Callable[[int], int] | None = None  # None until it is set

    def at(self, step: int) -> int:
        """Return the caller's difficulty at `step`.

        Raises:
            RuntimeError: no function has been set.
        """
        if self.law is None:
            raise RuntimeError(
                'the curriculum has "schedule_type": "custom" and no function yet: call '
                "engine.set_custom_curriculum_learning_schedule(function) before the first step, with a function "
                "from the step to a difficulty (a dict of such functions by metric for data_efficiency)"
            )
        return max(0, min(int(self.law(step)), self.high))


def with_laws(
    schedules: Mapping[str, Schedule], laws: Mapping[str, Callable[[int], int]] | Callable[[int], int]
) -> dict[str, Schedule]:
    """Return `schedules` with the caller's functions in the custom ones; one function serves a single one.

    Raises:
        ValueError: a function for a metric without custom schedule, or one function for several metrics.
    """
    custom = [name for name, schedule in schedules.items() if isinstance(schedule, Custom)]
    named = dict.fromkeys(custom[:1] if len(custom) == 1 else (), laws) if callable(laws) else dict(laws)
    strangers = sorted(set(named) - set(custom))
    if strangers or not named:
        raise ValueError(
            f"a custom schedule was given for {', '.join(strangers) or 'no metric by name'}; metrics with "
            f'"schedule_type": "custom" are: {", ".join(custom) or "none"}. Pass a dict of functions by metric'
        )
    return {
        name: attrs.evolve(schedule, law=named[name]) if isinstance(schedule, Custom) and name in named else schedule
        for name, schedule in schedules.items()
    }
