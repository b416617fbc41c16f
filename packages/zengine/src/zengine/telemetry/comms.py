"""What was communicated: a tally by operation, from zcomm's trace.

The trace is process-wide: two engines in one process see each other's collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import final

import attrs

from zengine.telemetry.plans import Trace, TraceRecord

_HEADER = ("operation", "count", "MiB", "ms", "GB/s")


@attrs.frozen(kw_only=True)
class Tally:
    """Collectives of one kind, added up."""

    count: int = 0
    nbytes: int = 0  # payload of this rank
    ms: float = 0.0  # host time; overlapping collectives add up

    def plus(self, record: TraceRecord) -> Tally:
        return Tally(count=self.count + 1, nbytes=self.nbytes + record.nbytes, ms=self.ms + record.ms)

    @property
    def gb_per_s(self) -> float:
        """Algorithm bandwidth: payload over time, whatever the algorithm really sent."""
        return self.nbytes / self.ms / 1e6 if self.ms > 0 else 0.0


@final
class CommsLog:
    """Counts every collective from construction to `close`, in total and by step."""

    def __init__(self, trace: Trace) -> None:
        self._lock = threading.Lock()  # autograd runs reduction hooks on its own threads
        self._total: dict[str, Tally] = {}
        self._step: dict[str, Tally] = {}  # since the last boundary
        self._tracing = ExitStack()
        self._tracing.enter_context(trace(self._add))

    def step_end(self) -> Mapping[str, Tally]:
        """The tallies since the last call, by operation."""
        with self._lock:
            done, self._step = self._step, {}
        return done

    def table(self) -> str:
        """All collectives so far, one operation a line, those with most time first."""
        with self._lock:
            total = sorted(self._total.items(), key=lambda item: -item[1].ms)
        return format_table(dict(total))

    def close(self) -> None:
        self._tracing.close()

    def _add(self, record: TraceRecord) -> None:
        with self._lock:
            for tallies in (self._total, self._step):
                tallies[record.op] = tallies.get(record.op, Tally()).plus(record)


@final
class NoCommsLog:
    """The identity."""

    def step_end(self) -> Mapping[str, Tally]:
        return {}

    def table(self) -> str:
        return ""

    def close(self) -> None: ...


def format_table(tallies: Mapping[str, Tally]) -> str:
    """A table with one line for each operation, in the order given."""
    if not tallies:
        return "communication: none"
    rows = [_HEADER] + [
        (op, str(tally.count), f"{tally.nbytes / 2**20:.2f}", f"{tally.ms:.2f}", f"{tally.gb_per_s:.2f}")
        for op, tally in tallies.items()
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
    return "\n".join(["communication of this rank so far (GB/s = payload over time):", *lines])
