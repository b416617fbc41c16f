"""Communication tallies: collectives by operation and message size, from zcomm's trace.

The trace is process-wide: two engines in one process see each other's collectives.

Two bandwidths, as in communication benchmarks.  Algorithm bandwidth is payload over time; bus bandwidth counts the
bytes that cross a link, (n-1)/n of a gathered or scattered payload and twice that of an all-reduce, so it is
comparable with the hardware for any number of ranks.  Time is the host's, from issue to the end of the wait: where
communication overlaps computation both bandwidths are below what the links allow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, TypeAlias, final

import attrs

if TYPE_CHECKING:
    import zcomm

    Trace: TypeAlias = Callable[[Callable[[zcomm.Record], None]], AbstractContextManager[object]]  # zcomm.traced

__all__ = ["CommsLog", "Messages", "NoCommsLog", "Tally", "columns", "format_messages", "plain_name"]

log = logging.getLogger("zengine")

_HEADER = ("operation", "size", "ranks", "count", "MiB", "ms", "waited", "algbw GB/s", "busbw GB/s")
# Bytes that cross a link for each byte of payload, in (n-1)/n.
_BUS_FACTORS = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
_ENDINGS = ("_into_tensor", "_tensor", "_base", "_fn", "_coalesced", "_single")  # of other engines' names


@attrs.frozen(kw_only=True)
class Tally:
    """Totals of the collectives of one kind."""

    count: int = 0
    nbytes: int = 0  # payload of this rank
    ms: float = 0.0  # host time; overlapping collectives add up
    wait_ms: float = 0.0  # the part of it that a thread stood still

    def plus(self, record: zcomm.Record) -> Tally:
        return Tally(
            count=self.count + 1,
            nbytes=self.nbytes + record.nbytes,
            ms=self.ms + record.ms,
            wait_ms=self.wait_ms + record.wait_ms,
        )

    @property
    def gb_per_s(self) -> float:
        """Algorithm bandwidth: payload over time."""
        return self.nbytes / self.ms / 1e6 if self.ms > 0 else 0.0


@attrs.frozen
class Messages:
    """All collectives of one operation with one message size and group size."""

    op: str
    size_bytes: int  # payload of one: the larger of input and output
    group_size: int
    tally: Tally = Tally()

    @property
    def key(self) -> tuple[str, int, int]:
        return self.op, self.size_bytes, self.group_size

    @property
    def bus_gb_per_s(self) -> float:
        """Bus bandwidth; the algorithm bandwidth for operations without a factor (broadcast)."""
        share = (self.group_size - 1) / max(self.group_size, 1)
        return self.tally.gb_per_s * (_BUS_FACTORS[self.op] * share if self.op in _BUS_FACTORS else 1.0)


def plain_name(op: str) -> str:
    """Strip variant suffixes of other engines: "all_gather_into_tensor" -> "all_gather"."""
    ending = next((ending for ending in _ENDINGS if op.endswith(ending)), "")
    return plain_name(op.removesuffix(ending)) if ending else op


@final
class CommsLog:
    """Counts collectives from construction to `close`, in total and by step.

    ops: names of the counted operations; () counts all.
    """

    def __init__(self, trace: Trace, ops: Sequence[str] = ()) -> None:
        self._ops = frozenset(map(plain_name, ops))
        self._lock = threading.Lock()  # autograd runs reduction hooks on its own threads
        self._total: dict[tuple[str, int, int], Tally] = {}
        self._step: dict[str, Tally] = {}  # since the last boundary
        self._tracing = ExitStack()
        self._tracing.enter_context(trace(self._add))

    def step_end(self) -> Mapping[str, Tally]:
        """Return the tallies since the last call, by operation."""
        with self._lock:
            done, self._step = self._step, {}
        return done

    def messages(self) -> list[Messages]:
        """Return all collectives so far, those with the most time first."""
        with self._lock:
            total = list(self._total.items())
        return [Messages(*key, tally) for key, tally in sorted(total, key=lambda item: -item[1].ms)]

    def table(self) -> str:
        """Return `messages` as text."""
        return format_messages(self.messages())

    def close(self) -> None:
        self._tracing.close()

    def _add(self, record: zcomm.Record) -> None:
        if self._ops and plain_name(record.op) not in self._ops:
            return
        key = (record.op, record.nbytes, record.group_size)
        with self._lock:
            self._total[key] = self._total.get(key, Tally()).plus(record)
            self._step[record.op] = self._step.get(record.op, Tally()).plus(record)


@final
class NoCommsLog:
    """Null object: counts nothing."""

    def step_end(self) -> Mapping[str, Tally]:
        return {}

    def messages(self) -> list[Messages]:
        return []

    def table(self) -> str:
        return ""

    def close(self) -> None: ...


def log_collective(record: zcomm.Record, *, with_label: bool) -> None:
    """Log one collective."""
    label = f" [{record.label}]" if with_label and record.label else ""
    log.info(
        "%s%s: %s over %d ranks, %.2f ms, waited %.2f ms",
        *(record.op, label, size_text(record.nbytes), record.group_size, record.ms, record.wait_ms),
    )


def size_text(nbytes: int) -> str:
    """Format a size: 12 B, 1.5 KiB, 3 MiB."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def format_messages(messages: Iterable[Messages]) -> str:
    """Format a table with one line per entry, in the given order."""
    rows = [_row(each) for each in messages]
    if not rows:
        return "communication: none"
    head = "communication of this rank so far (size: payload of one; ms: host time, of which it waited):"
    return "\n".join([head, *columns([_HEADER, *rows])])


def _row(each: Messages) -> tuple[str, ...]:
    tally = each.tally
    counts = (str(each.group_size), str(tally.count), f"{tally.nbytes / 2**20:.2f}")
    times = (f"{tally.ms:.2f}", f"{tally.wait_ms:.2f}")
    return (each.op, size_text(each.size_bytes), *counts, *times, f"{tally.gb_per_s:.3g}", f"{each.bus_gb_per_s:.3g}")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows: the first column left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
