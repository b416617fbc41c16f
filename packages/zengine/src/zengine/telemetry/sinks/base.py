"""Sinks, and the guarantee that a failing sink never stops training.

A sink may fail at any moment: the disk fills, the service goes away.  `Sinks` then logs once which one failed, where
and why, drops it for the rest of the run, and training continues.  It logs instead of calling `warnings.warn`,
because a program that turns warnings into errors must not be stopped either.  A package that is not installed is
different: it is a mistake in the configuration, known before training, and raises on every rank.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, final

from zengine.telemetry.snapshot import SAMPLES

if TYPE_CHECKING:
    from zengine.telemetry.snapshot import Snapshot
    from zengine.telemetry.subject import RunRecord

logger = logging.getLogger("zengine.telemetry")

Events: TypeAlias = Sequence[tuple[str, float, int]]  # tag, value, place on the x axis


class Sink:
    """Writes one snapshot per boundary, and events of the program.  This base class writes nothing."""

    def begin(self, record: RunRecord) -> None:
        """Receive the record of the complete run; called once, before the first snapshot."""

    def write(self, snapshot: Snapshot) -> None:
        """Write the snapshot of a boundary."""

    def write_events(self, events: Events) -> None:
        """Write scalars of the program."""

    def close(self) -> None:
        """Close; no more calls follow."""


class ServiceSink(Sink):
    """Sends metrics to a service whose curves have one axis: DeepSpeed's tags over samples, the others over steps.

    interval: least number of samples between two points, so that a service does not slow a run of small steps.
    """

    def __init__(self, interval: int = 1) -> None:
        self._interval = interval
        self._due = 0  # samples at which the next point is sent

    def send(self, metrics: Mapping[str, float], x: int) -> None:
        """Send metrics of one place on the x axis."""

    def write(self, snapshot: Snapshot) -> None:
        samples = snapshot.report.samples
        if samples < self._due:
            return
        self._due = samples + self._interval
        scalars = snapshot.scalars()
        theirs = {tag: value for tag, value in scalars.items() if tag.startswith(SAMPLES)}
        self.send(theirs, samples)
        self.send({tag: value for tag, value in scalars.items() if tag not in theirs}, snapshot.report.step)

    def write_events(self, events: Events) -> None:
        for tag, value, x in events:
            self.send({tag: float(value)}, x)


class MissingPackageError(ImportError):
    """Package of an enabled sink is not installed."""


@final
class Sinks:
    """The sinks that have not failed."""

    def __init__(self) -> None:
        self._open: list[tuple[str, Sink]] = []  # what and where, for the message; and the sink

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, what: str, make: Callable[[], Sink]) -> None:
        """Open a sink; `what` names it and its destination, e.g. "TensorBoard events in runs/a"."""
        try:
            self._open.append((what, make()))
        except Exception as cause:
            _warn(what, cause)

    def begin(self, record: RunRecord) -> None:
        self._each(lambda sink: sink.begin(record))

    def write(self, snapshot: Snapshot) -> None:
        self._each(lambda sink: sink.write(snapshot))

    def write_events(self, events: Events) -> None:
        self._each(lambda sink: sink.write_events(events))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._open = []

    def _each(self, act: Callable[[Sink], None]) -> None:
        working = []
        for what, sink in self._open:
            try:
                act(sink)
                working.append((what, sink))
            except Exception as cause:
                _warn(what, cause)
        self._open = working


@contextmanager
def log_os_errors(what: str) -> Iterator[None]:
    """Log OSErrors of the block instead of raising; `what` names the output and its destination."""
    try:
        yield
    except OSError as cause:
        _warn(what, cause)


def _warn(what: str, cause: Exception) -> None:
    logger.warning(
        "%s: writing failed and is disabled for the rest of this run; training goes on. Cause: %s: %s",
        what,
        type(cause).__name__,
        cause,
    )


def is_installed(package: str) -> bool:
    """Return True if the package is importable; a bare folder of its name (wandb leaves one) is not."""
    if package in sys.modules:
        return sys.modules[package] is not None
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
