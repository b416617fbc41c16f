"""Difficulty schedules: pure functions of the step, one frozen value each.

    FixedRoot(low=8, high=64, steps=100, multiple=8).at(50)    # 32: the schedule of fixed_linear (degree 1)

A difficulty is any limit of a curriculum: tokens of a sequence, a percentile, tokens that a layer processes.  It
depends on the step alone, so there is nothing to save, and a resumed run continues at the step counter.

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
    """d = floor((t/T)^(1/r) * (high - low) + low), down to a multiple, at most `high`; r = 1 is fixed_linear.

    Raises ValueError for a field out of its range.
    """

    low: int  # at step 0
    high: int  # at the end
    steps: int  # T: steps of the curriculum
    multiple: int = 1  # d is rounded down to a multiple of it
    degree: float = 1.0  # r: 2 grows fast first, then slowly

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"a schedule needs 0 <= minimum <= maximum, got {self.low} and {self.high}")
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
    """`difficulties[i]` up to and including step `until[i]`, then the last one.

    Raises ValueError if the numbers of both do not fit or do not increase.
    """

    difficulties: tuple[int, ...]
    until: tuple[int, ...]  # one less than difficulties, increasing

    def __attrs_post_init__(self) -> None:
        if not self.difficulties or len(self.until) != len(self.difficulties) - 1:
            raise ValueError(
                f"every difficulty except the last needs a last step: {len(self.difficulties)} difficulties need "
                f"{max(len(self.difficulties) - 1, 0)} steps, got {len(self.until)}"
            )
        if any(value < 0 for value in self.difficulties) or list(self.until) != sorted(set(self.until)):
            raise ValueError(
                f"difficulties must be >= 0 and their last steps must increase, got {list(self.difficulties)} and "
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
    """User-defined schedule (step -> difficulty), truncated to an integer and clamped to 0..`high`."""

    low: int
    high: int
    function: Callable[[int], int] | None = None  # None until set

    def at(self, step: int) -> int:
        """Return the difficulty at `step`.

        Raises:
            RuntimeError: no function has been set.
        """
        if self.function is None:
            raise RuntimeError(
                'the curriculum has "schedule_type": "custom" but no function: call '
                "engine.set_custom_curriculum_learning_schedule(function) before the first step, with a function "
                "from the step to a difficulty (a dict of such functions by metric for data_efficiency)"
            )
        return max(0, min(int(self.function(step)), self.high))


def with_custom_functions(
    schedules: Mapping[str, Schedule], functions: Mapping[str, Callable[[int], int]] | Callable[[int], int]
) -> dict[str, Schedule]:
    """Return `schedules` with the functions of the custom ones set; a bare function serves a single custom schedule.

    Raises:
        ValueError: a function for a metric without a custom schedule, or a bare function for several metrics.
    """
    custom = [name for name, schedule in schedules.items() if isinstance(schedule, Custom)]
    named = (
        dict.fromkeys(custom[:1] if len(custom) == 1 else (), functions) if callable(functions) else dict(functions)
    )
    unknown = sorted(set(named) - set(custom))
    if unknown or not named:
        raise ValueError(
            f"got a custom schedule for {', '.join(unknown) or 'no metric by name'}; metrics with "
            f'"schedule_type": "custom" are: {", ".join(custom) or "none"}. Pass a dict of functions by metric'
        )
    return {
        name: attrs.evolve(schedule, function=named[name])
        if isinstance(schedule, Custom) and name in named
        else schedule
        for name, schedule in schedules.items()
    }
