"""Time of a step by phase: phases as context managers, and a stopwatch that observes them.

Two families, named as in DeepSpeed's dashboards:

- micro:  `forward_microstep`, `backward_microstep`, `backward_allreduce_microstep`, `step_microstep` are the
  milliseconds of the last micro-step alone;
- global: `forward`, `backward`, `backward_allreduce`, `step` are totals over the micro-steps since the last boundary;
- `backward_inner` of both is backward without the waits for collectives in it.

A phase includes nested phases, and a phase entered again while open is timed once, from its outermost entry to its
outermost exit.  `backward_allreduce` is exposed communication: the time this rank waited for collectives while any
phase was open.  It is part of the phase it happens in; communication that overlaps computation is not in it (the
communication table of `comms_logger` has the full time of each collective).  Under NCCL the stream waits, and the
time is that between two events.

Host-only phases use the host's clock: `data`, the wait for the loader's next batch, and `checkpoint`, the time a save
blocks the loop.  Both happen between the others and are reported with the next boundary.

On CUDA a phase records two events and waits for nothing; the boundary synchronizes once on the last event and reads
all of them.  So launches run ahead of the device as without timers, and phase times are device times.
Rejected: a synchronisation at each edge, as in DeepSpeed's timers, which adds the host's launches to every phase; and
reading events one step later, which needs no wait but labels times with the wrong step.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, final

import attrs

from zengine.telemetry.instants import HOST, DeviceInterval, HostInterval, Instants, Interval

if TYPE_CHECKING:
    import zcomm
    from zengine.telemetry.comms import Trace

HOST_PHASES = ("data", "checkpoint")  # outside of a step's work, on the host's clock
STEP_PHASES = ("forward", "backward", "step")
PHASES = (*STEP_PHASES, *HOST_PHASES)  # names of `span`
COMMUNICATION = "backward_allreduce"  # filled from the trace
INNER = "backward_inner"  # backward without that
# Reported timers, in the order of a step; host phases only if they occurred.
TIMERS = ("data", "forward", "backward", INNER, COMMUNICATION, "step", "checkpoint")
MICRO = "_microstep"  # suffix of the micro family


class Observer(Protocol):
    """Receives the outermost entry and the outermost exit of each phase."""

    def phase_begin(self, name: str) -> None: ...

    def phase_end(self, name: str) -> None: ...


@final
class Span:
    """One phase: a reentrant context manager."""

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
    """Return the context manager of each phase; one shared empty one without observers."""
    if not observers:
        return dict.fromkeys(PHASES, nullcontext())
    return {name: Span(name, observers) for name in PHASES}


@attrs.define(eq=False)
class Lap:
    """Intervals and waits for collectives since some moment, read on demand."""

    intervals: list[tuple[str, Interval]] = attrs.field(factory=list)  # phase -> begin and end
    waits: list[tuple[str, Interval]] = attrs.field(factory=list)  # innermost open phase -> begin and end

    def __bool__(self) -> bool:
        return bool(self.intervals or self.waits)

    def read(self) -> dict[str, float]:
        """Return milliseconds by timer: 0 for phases of the step without measurement; host phases are then absent."""
        seen = {name for name, _ in self.intervals}
        found = {timer: 0.0 for timer in TIMERS if timer in seen or timer not in HOST_PHASES}
        for name, interval in self.intervals:
            found[name] += interval.ms()
        waits = [(name, interval.ms()) for name, interval in self.waits]
        found[COMMUNICATION] = sum(ms for _, ms in waits)
        found[INNER] = max(0.0, found["backward"] - sum(ms for name, ms in waits if name == "backward"))
        return found


@final
@attrs.define(eq=False)
class Stopwatch:
    """Milliseconds per timer, by micro-step and since the last boundary.

    Invariant: the trace is open exactly while at least one phase of the step is open.
    """

    _trace: Trace  # zcomm.traced
    _device: Instants = HOST  # clock of the step phases
    _host: Instants = HOST  # clock of the host phases
    _begun: dict[str, object] = attrs.field(factory=dict, init=False)  # open phases and when they began
    _micro: Lap = attrs.field(factory=Lap, init=False)  # current micro-step
    _last_micro: Lap = attrs.field(factory=Lap, init=False)  # previous micro-step
    _total: Lap = attrs.field(factory=Lap, init=False)  # since the last boundary
    _tracing: ExitStack = attrs.field(factory=ExitStack, init=False)  # holds the open trace
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)  # records arrive on autograd's threads

    def observers(self) -> tuple[Observer, ...]:
        return (self,)

    def phase_begin(self, name: str) -> None:
        if name in STEP_PHASES and not self._open():
            self._tracing.enter_context(self._trace(self._communicated))
        self._begun[name] = self._clock_of(name).now()

    def phase_end(self, name: str) -> None:
        begin, clock = self._begun.pop(name), self._clock_of(name)
        try:
            interval = clock.interval(begin, clock.now())
            for lap in (self._micro, self._total):
                lap.intervals.append((name, interval))
        finally:
            if name in STEP_PHASES and not self._open():
                self._tracing.close()

    def micro_step_end(self) -> None:
        self._last_micro, self._micro = self._micro, Lap()

    def step_end(self) -> None:
        self._total = Lap()

    def reset(self) -> None:
        """Discard measurements; open phases stay open."""
        self._micro, self._last_micro, self._total = Lap(), Lap(), Lap()

    def micro_ms(self) -> dict[str, float]:
        """Return the micro family, by timer name without its suffix.

        At a boundary the calls that end the micro-step and the step may come in either order: the current micro-step
        counts as the last one as soon as it has measured anything.
        """
        self._device.synchronize()
        return (self._micro or self._last_micro).read()

    def total_ms(self) -> dict[str, float]:
        """Return the global family, by timer name."""
        self._device.synchronize()
        return self._total.read()

    def _open(self) -> list[str]:
        return [name for name in self._begun if name in STEP_PHASES]

    def _clock_of(self, name: str) -> Instants:
        return self._host if name in HOST_PHASES else self._device

    def _communicated(self, record: zcomm.Record) -> None:
        with self._lock:
            phase = (self._open() or [""])[-1]
            interval = DeviceInterval(*record.stall) if record.stall else HostInterval(0.0, record.wait_ms / 1e3)
            for lap in (self._micro, self._total):
                lap.waits.append((phase, interval))


@final
class NoStopwatch:
    """Null object: no timers."""

    def observers(self) -> tuple[Observer, ...]:
        return ()

    def micro_step_end(self) -> None: ...

    def step_end(self) -> None: ...

    def reset(self) -> None: ...

    def micro_ms(self) -> dict[str, float]:
        return {}

    def total_ms(self) -> dict[str, float]:
        return {}
