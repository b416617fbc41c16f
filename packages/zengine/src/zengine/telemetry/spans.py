"""Where the time of a step goes: phases as context managers, and a stopwatch that watches them.

Two families, by the names that users of DeepSpeed have in their dashboards:

- micro:  `forward_microstep`, `backward_microstep`, `backward_allreduce_microstep`, `step_microstep` are the
  milliseconds of the last micro-step alone;
- global: `forward`, `backward`, `backward_allreduce`, `step` are the totals of all micro-steps since the last
  boundary.

A phase is inclusive: what is nested in it counts in it too, and a phase entered again while it is open is
timed once, from its outermost entry to its outermost exit. `backward_allreduce` is the communication that shows:
the time that this rank spent waiting for collectives while any phase was open. It is part of the phase it happens
in, not beside it; what overlaps with computation is not in it (the communication table of `comms_logger` has the
whole time of each collective). Under NCCL waiting happens on the device, where the host cannot see it.

On CUDA each edge of a phase synchronises the device, otherwise the host would time the launches. That is the
price of the breakdown, and why nothing is timed unless it was asked for. Rejected: CUDA events without
synchronisation; their times are only readable a step later, and communication on other streams would still be
missed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Protocol, final

import attrs

from zengine.telemetry.plans import Trace, TraceRecord

PHASES = ("forward", "backward", "step")  # what can be opened
COMMUNICATION = "backward_allreduce"  # filled from the trace
TIMERS = ("forward", "backward", COMMUNICATION, "step")  # what is reported, in the order of a step
MICRO = "_microstep"  # suffix of the micro family


class Observer(Protocol):
    """Is told when a phase opens (outermost entry) and when it closes (outermost exit)."""

    def phase_begin(self, name: str) -> None: ...

    def phase_end(self, name: str) -> None: ...


@final
class Span:
    """One phase: a context manager that may be entered again, also while it is open."""

    def __init__(self, name: str, observers: tuple[Observer, ...]) -> None:
        self._name = name
        self._observers = observers
        self._depth = 0  # entries not yet left

    def __enter__(self) -> None:
        if self._depth == 0:
            for observer in self._observers:
                observer.phase_begin(self._name)
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            for observer in reversed(self._observers):
                observer.phase_end(self._name)


def make_spans(observers: tuple[Observer, ...]) -> Mapping[str, AbstractContextManager[None]]:
    """The context manager of each phase; all the same empty one when nobody observes."""
    if not observers:
        return dict.fromkeys(PHASES, nullcontext())
    return {name: Span(name, observers) for name in PHASES}


@final
@attrs.define(eq=False)
class Stopwatch:
    """Milliseconds per timer, by micro-step and since the last boundary.

    Invariant: the trace is open exactly while at least one phase is open.
    """

    _trace: Trace  # zcomm.traced
    _synchronize: Callable[[], object] = lambda: None  # waits for the device; the identity on CPUs
    _clock: Callable[[], float] = time.perf_counter  # seconds
    _begun: dict[str, float] = attrs.field(factory=dict, init=False)  # open phases and when they began
    _micro: dict[str, float] = attrs.field(factory=dict, init=False)  # ms of the micro-step under way
    _last_micro: dict[str, float] = attrs.field(factory=dict, init=False)  # ms of the one before
    _total: dict[str, float] = attrs.field(factory=dict, init=False)  # ms since the last boundary
    _tracing: ExitStack = attrs.field(factory=ExitStack, init=False)  # holds the open trace
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)  # records arrive on autograd's threads

    def observers(self) -> tuple[Observer, ...]:
        return (self,)

    def phase_begin(self, name: str) -> None:
        self._synchronize()
        if not self._begun:
            self._tracing.enter_context(self._trace(self._communicated))
        self._begun[name] = self._clock()

    def phase_end(self, name: str) -> None:
        try:
            self._synchronize()
        finally:
            self._add(name, (self._clock() - self._begun.pop(name)) * 1e3)
            if not self._begun:
                self._tracing.close()

    def micro_step_end(self) -> None:
        self._last_micro, self._micro = self._micro, {}

    def step_end(self) -> None:
        self._total = {}

    def reset(self) -> None:
        """Forget what was measured; open phases stay open."""
        self._micro, self._last_micro, self._total = {}, {}, {}

    def micro_ms(self) -> dict[str, float]:
        """The micro family, by timer name without its suffix.

        At a boundary the two calls that end the micro-step and the step may come in either order: the
        micro-step under way counts as the last one as soon as it has measured anything.
        """
        return _all_timers(self._micro or self._last_micro)

    def total_ms(self) -> dict[str, float]:
        """The global family, by timer name."""
        return _all_timers(self._total)

    def _communicated(self, record: TraceRecord) -> None:
        self._add(COMMUNICATION, record.wait_ms)

    def _add(self, timer: str, ms: float) -> None:
        with self._lock:
            self._micro[timer] = self._micro.get(timer, 0.0) + ms
            self._total[timer] = self._total.get(timer, 0.0) + ms


@final
class NoStopwatch:
    """The identity: no timers, so nothing to report."""

    def observers(self) -> tuple[Observer, ...]:
        return ()

    def micro_step_end(self) -> None: ...

    def step_end(self) -> None: ...

    def reset(self) -> None: ...

    def micro_ms(self) -> dict[str, float]:
        return {}

    def total_ms(self) -> dict[str, float]:
        return {}


def _all_timers(measured: Mapping[str, float]) -> dict[str, float]:
    """Every timer in the order of a step, those without a measurement as 0."""
    return {timer: measured.get(timer, 0.0) for timer in TIMERS}
