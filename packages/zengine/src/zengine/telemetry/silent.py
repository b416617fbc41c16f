"""Null object of telemetry, and the countdown of `bench_steps`.

With `bench_steps`, rank 0 prints a summary (sinks/bench.py) after the warm-up and that many steps, and
`engine.bench_done` becomes True on every rank.  Training continues unless the loop checks it and stops.
Rejected: an exception out of `step()`, which kills a run whose config still has the key; and `sys.exit`, which leaves
the other ranks behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final

import attrs

if TYPE_CHECKING:
    from zengine.step_report import StepReport
    from zengine.telemetry.sinks import Events
    from zengine.telemetry.subject import Subject


@final
@attrs.define(eq=False)
class Countdown:
    """Boundaries until a bench run is complete; every rank counts, so all agree."""

    steps: int  # boundaries in all, warm-up included; 0 means never
    seen: int = 0  # boundaries since the start or a reset

    def step_end(self) -> None:
        self.seen += 1

    def reset(self) -> None:
        """Restart, warm-up included."""
        self.seen = 0

    @property
    def is_over(self) -> bool:
        return 0 < self.steps <= self.seen


def make_countdown(bench_steps: int, warmup_steps: int) -> Countdown:
    """Return the countdown of `bench_steps` (0: never) after the warm-up."""
    return Countdown(bench_steps + warmup_steps if bench_steps else 0)


_NOTHING: AbstractContextManager[None] = nullcontext()


@final
@attrs.define(eq=False)
class Silent:
    """Null object: measures and writes nothing; counts boundaries for `bench_done`."""

    countdown: Countdown = attrs.field(factory=lambda: Countdown(0))

    def span(self, name: str) -> AbstractContextManager[None]:
        return _NOTHING

    def paused(self) -> AbstractContextManager[None]:
        return _NOTHING

    def begin(self, subject: Subject) -> None: ...

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None: ...

    def report_tokens(self, num_tokens: int) -> None: ...

    def recomputes(self, share: float) -> None: ...

    def counted(self, flops_per_sample: float) -> None: ...

    def layers(self, norms: Mapping[str, float]) -> None: ...

    def write_events(self, events: Events, flush: bool = True) -> None: ...

    def micro_step_end(self) -> None: ...

    def step_end(self, report: StepReport) -> None:
        self.countdown.step_end()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.countdown.reset()

    def close(self) -> None: ...

    @property
    def enabled(self) -> bool:
        return False

    @property
    def bench_done(self) -> bool:
        return self.countdown.is_over
