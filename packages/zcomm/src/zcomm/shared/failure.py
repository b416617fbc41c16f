"""Failures of a group that shares memory, as messages.

C reports a kind, a culprit and the rank that found out.  The message names the culprit, by its global rank and its
process, and the call.  The kinds are numbered as in csrc/zs_api.h.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import Any

import attrs

from zcomm.hangs.fingerprint import call_name
from zcomm.shared.native import OPS, REDUCTIONS, dtype_name

__all__ = ["CallSignature", "FailureKind", "FailureReport", "SharedMemoryFailed", "describe", "forked_message"]


class SharedMemoryFailed(RuntimeError):
    """Raised when a collective through shared memory fails.  `zcomm` raises CollectiveFailed in its place."""


def forked_message(pid: int) -> str:
    """Error text for a forked child that uses a group of its parent."""
    return (
        f"process {os.getpid()} was forked from process {pid}, which is the member of this group. Communicate in the "
        "parent, or initialize a separate world in the child."
    )


class FailureKind(enum.IntEnum):
    """Reason for which a group is broken."""

    FINE = 0
    DIED = 1  # the culprit's process has ended
    TIMED_OUT = 2  # the reporter waited for the culprit up to the group's time limit
    CLOSED = 3  # the culprit has left the group
    DISAGREE = 4  # the culprit's call differs from that of rank 0
    ELSEWHERE = 5  # the culprit has lost the ranks on other hosts


@attrs.frozen
class CallSignature:
    """Arguments of a rank's call that must be equal on all ranks."""

    op: int  # as in names.OPS
    dtype: int  # as in names.DTYPES; -1 for a barrier
    reduction: int  # as in names.REDUCTIONS; -1 where there is none
    source: int  # of a broadcast; of an all_to_all_v the checksum of its table
    numel: int  # of the tensor, or of one slice
    label: str
    stride: int = 0  # elements from one slice to the next; 0 without slices

    def __str__(self) -> str:
        call, details = call_name(OPS[self.op], self.label), []
        if self.dtype >= 0:
            whose = {"all_reduce": "", "broadcast": "", "all_to_all_v": " at most"}.get(OPS[self.op], " a rank")
            call += f" of {self.numel} {dtype_name(self.dtype)}{whose}"
        if self.stride > self.numel:
            details.append(f"{self.stride} apart")
        if self.reduction >= 0:
            details.append(f"op {REDUCTIONS[self.reduction]!r}")
        if OPS[self.op] == "broadcast":
            details.append(f"source {self.source}")
        if OPS[self.op] == "all_to_all_v":
            details.append(f"table {self.source:08x}")
        return call + (f" ({', '.join(details)})" if details else "")


@attrs.frozen
class FailureReport:
    """Failure of a group, as C reports it."""

    kind: FailureKind
    rank: int  # the culprit's rank in the group
    reporter: int  # rank in the group that found out
    ticket: int  # of the call during which this rank noticed; 0 for none
    seconds: float  # waited by the reporter
    label: str  # of that call
    first: CallSignature | None = None  # of rank 0 and of the culprit, if they disagree
    second: CallSignature | None = None

    @classmethod
    def read(cls, ffi: Any, report: Any) -> FailureReport:
        """Read the C struct."""
        label = ffi.string(report.label).decode(errors="replace")
        found = cls(FailureKind(report.kind), report.rank, report.reporter, report.ticket, report.seconds, label)
        if found.kind is not FailureKind.DISAGREE:
            return found
        return attrs.evolve(found, first=_signature(ffi, report.first), second=_signature(ffi, report.second))


def describe(report: FailureReport, *, rank: int, ranks: Sequence[int], pids: Sequence[int], ticket: int) -> str:
    """Return one line for the error of call number `ticket` on `rank`, a rank of the group.

    ranks, pids: of the members, in the world and in the system.
    """

    def who(place: int) -> str:
        return "this rank" if place == rank else f"rank {ranks[place]} (process {pids[place]})"

    culprit, by = who(report.rank), "" if report.reporter == rank else f", reported by {who(report.reporter)}"
    if report.kind is FailureKind.DIED:
        text = f"{culprit} has died{by}"
    elif report.kind is FailureKind.TIMED_OUT:
        text = f"{who(report.reporter)} waited {report.seconds:.1f} s for {culprit}, the time limit of the group"
    elif report.kind is FailureKind.DISAGREE and report.first is not None and report.second is not None:
        text = f"the ranks disagree: rank {ranks[0]} calls {report.first}, rank {ranks[report.rank]} {report.second}"
    elif report.kind is FailureKind.DISAGREE:
        text = f"{who(report.reporter)} found that the calls of the ranks disagree"
    elif report.kind is FailureKind.ELSEWHERE:
        text = f"{culprit} has lost its connection to the ranks on other hosts"
    else:
        text = f"{culprit} has closed the group"
    since = repr(report.label) if report.label else "an earlier collective"
    earlier = f" The group is unusable since {since}." if report.ticket and report.ticket < ticket else ""
    return f"{text}.{earlier}"


def _signature(ffi: Any, found: Any) -> CallSignature:
    label = ffi.string(found.label).decode(errors="replace")
    return CallSignature(found.op, found.dtype, found.reduction, found.source, found.numel, label, found.stride)
