"""Timestamps on the host's clock or on a device stream, where they are readable once they have passed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, final

import attrs
import torch


class Interval(Protocol):
    """Time between two timestamps."""

    def ms(self) -> float:
        """Return milliseconds.  On a device, call `Instants.synchronize` first, or each interval synchronizes."""


class Instants(Protocol):
    """Source of timestamps of one clock."""

    def now(self) -> Any:
        """Return the host's time, or an event recorded behind the work queued on the stream."""

    def interval(self, begin: Any, end: Any) -> Interval: ...

    def synchronize(self) -> None:
        """Block until every timestamp so far is readable."""


@final
@attrs.frozen
class HostInterval:
    """Two readings of the host's clock, in seconds."""

    begin: float
    end: float

    def ms(self) -> float:
        return (self.end - self.begin) * 1e3


@final
@attrs.frozen(eq=False)
class HostInstants:
    """Host clock; its timestamps have passed once made."""

    clock: Callable[[], float] = time.perf_counter  # seconds

    def now(self) -> float:
        return self.clock()

    def interval(self, begin: float, end: float) -> HostInterval:
        return HostInterval(begin, end)

    def synchronize(self) -> None: ...


HOST: Instants = HostInstants()


@final
@attrs.frozen(eq=False)
class DeviceInterval:
    """Two events on a stream."""

    begin: Any  # torch.cuda.Event with timing
    end: Any

    def ms(self) -> float:
        if not self.end.query():  # of another stream than the one that was synchronized
            self.end.synchronize()
        return float(self.begin.elapsed_time(self.end))


def _make_event() -> Any:
    event: Callable[..., Any] = torch.cuda.Event
    return event(enable_timing=True)


@final
@attrs.define(eq=False)
class DeviceInstants:
    """Events on the current CUDA stream.

    Invariant: `last` is the newest event, so all events are readable after waiting for it.
    """

    make: Callable[[], Any] = _make_event
    last: list[Any] = attrs.field(factory=list)  # none, or one that has not been waited for

    def now(self) -> Any:
        event = self.make()
        event.record()
        self.last = [event]
        return event

    def interval(self, begin: Any, end: Any) -> DeviceInterval:
        return DeviceInterval(begin, end)

    def synchronize(self) -> None:
        while self.last:
            self.last.pop().synchronize()
