"""The identity of the telemetry slot: on ranks other than 0, and where nothing is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import attrs

from zengine.report import StepReport
from zengine.telemetry.countdown import Countdown
from zengine.telemetry.sinks import Events
from zengine.telemetry.subject import Subject

_NOTHING: AbstractContextManager[None] = nullcontext()


@final
@attrs.define(eq=False)
class Silent:
    """The identity: measures nothing, writes nothing; counts boundaries, for `bench_done`."""

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
