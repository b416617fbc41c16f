"""What went wrong in a group that shares memory, in words.

C reports a kind, a culprit and who found out; here that becomes one line that names the culprit by its rank in the
world and its process, and the call.  The kinds are numbered as in csrc/zs_api.h.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import Any

import attrs

from zcomm.handles import named
from zcomm.shared.names import OPS, REDUCTIONS, dtype_name

__all__ = ["Kind", "Report", "SharedMemoryFailed", "Wish", "describe", "forked_from"]


class SharedMemoryFailed(RuntimeError):
    """A collective through shared memory ended in an error.  `zcomm` raises CollectiveFailed in its place."""


def forked_from(pid: int) -> str:
    """What a forked child is told that uses a group of its parent's."""
    return (
        f"process {os.getpid()} was forked from process {pid}, which is the member of this group. Communicate in the "
        "parent, or join a world of the child's own."
    )


class Kind(enum.IntEnum):
    """Why a group is broken."""

    FINE = 0
    DIED = 1  # the culprit's process has ended
    TIMED_OUT = 2  # the teller waited for the culprit up to the group's limit
    CLOSED = 3  # the culprit has left the group
    DISAGREE = 4  # the culprit's call does not fit that of rank 0
    ELSEWHERE = 5  # the culprit has lost what else the group consists of: the ranks on other hosts


@attrs.frozen
class Wish:
    """A rank's call, as far as the ranks must agree."""

    op: int  # as in names.OPS
    dtype: int  # as in names.DTYPES; -1 for a barrier
    reduction: int  # as in names.REDUCTIONS; -1 where there is none
    source: int  # of a broadcast; of an exchange the checksum of its table
    numel: int  # of the tensor, or of one slice
    label: str
    stride: int = 0  # elements from one slice to the next; 0 where there are none

    def __str__(self) -> str:
        call, details = named(OPS[self.op], self.label), []
        if self.dtype >= 0:
            whose = {"all_reduce": "", "broadcast": "", "exchange": " at most"}.get(OPS[self.op], " a rank")
            call += f" of {self.numel} {dtype_name(self.dtype)}{whose}"
        if self.stride > self.numel:
            details.append(f"{self.stride} apart")
        if self.reduction >= 0:
            details.append(f"op {REDUCTIONS[self.reduction]!r}")
        if OPS[self.op] == "broadcast":
            details.append(f"source {self.source}")
        if OPS[self.op] == "exchange":
            details.append(f"table {self.source:08x}")
        return call + (f" ({', '.join(details)})" if details else "")


@attrs.frozen
class Report:
    """Why a group is broken, as C tells it."""

    kind: Kind
    rank: int  # place of the culprit in the group
    teller: int  # place of the rank that found out
    ticket: int  # of the call during which this rank learnt it; 0 for none
    seconds: float  # that the teller waited
    label: str  # of that call
    first: Wish | None = None  # of rank 0 and of the culprit, where they disagree
    second: Wish | None = None

    @classmethod
    def read(cls, ffi: Any, report: Any) -> Report:
        """From the C struct."""
        label = ffi.string(report.label).decode(errors="replace")
        found = cls(Kind(report.kind), report.rank, report.teller, report.ticket, report.seconds, label)
        if found.kind is not Kind.DISAGREE:
            return found
        return attrs.evolve(found, first=_wish(ffi, report.first), second=_wish(ffi, report.second))


def describe(report: Report, *, rank: int, ranks: Sequence[int], pids: Sequence[int], ticket: int) -> str:
    """One line for the error of call number `ticket` on place `rank` of a group.

    ranks, pids: of the members, in the world and in the system.
    """

    def who(place: int) -> str:
        return "this rank" if place == rank else f"rank {ranks[place]} (process {pids[place]})"

    culprit, told = who(report.rank), "" if report.teller == rank else f", says {who(report.teller)}"
    if report.kind is Kind.DIED:
        text = f"{culprit} has died{told}"
    elif report.kind is Kind.TIMED_OUT:
        text = f"{who(report.teller)} waited {report.seconds:.1f} s for {culprit}, the time limit of the group"
    elif report.kind is Kind.DISAGREE and report.first is not None and report.second is not None:
        text = f"the ranks disagree: rank {ranks[0]} calls {report.first}, rank {ranks[report.rank]} {report.second}"
    elif report.kind is Kind.DISAGREE:
        text = f"{who(report.teller)} found that the calls of the ranks disagree"
    elif report.kind is Kind.ELSEWHERE:
        text = f"{culprit} has lost its connection to the ranks on other hosts"
    else:
        text = f"{culprit} has closed the group"
    since = repr(report.label) if report.label else "an earlier collective"
    earlier = f" The group is unusable since {since}." if report.ticket and report.ticket < ticket else ""
    return f"{text}.{earlier}"


def _wish(ffi: Any, found: Any) -> Wish:
    label = ffi.string(found.label).decode(errors="replace")
    return Wish(found.op, found.dtype, found.reduction, found.source, found.numel, label, found.stride)
