"""Reports: a rank's fingerprints and position, as values that travel to the other ranks after a failure.

A report travels as JSON through the rendezvous store, so it needs neither the group that hangs nor a pickle; its
field names are the protocol.  The rank that asks makes reports for ranks that cannot answer, so the analysis
(`diagnosis.py`) is a function of reports alone.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from typing import Any

import attrs

from zcomm.hangs.fingerprint import CallState, Fingerprint, Ring

_RECENT = 64  # fingerprints per group in a report: 10 kB, and a mismatch is rarely older


class Answer(enum.Enum):
    """Kind of a rank's answer."""

    REPORTED = "told"  # it published a report
    LEFT = "left"  # it closed its world, or destroyed the default group, and published that
    GONE = "gone"  # its process has ended
    SILENT = "silent"  # no report came in time


@attrs.frozen
class CallSummary:
    """One fingerprint as text."""

    sequence: int  # place in the group's order of issue, from 1
    op: str
    label: str
    detail: str  # "sum", "from rank 3", or ""
    payload: str  # "float32[4]": dtype and number of elements; "" for a barrier
    context: str  # the caller's `context`
    site: str  # line of the user's program
    state: CallState

    @classmethod
    def of(cls, seen: Fingerprint) -> CallSummary:
        call = seen.call
        payload = f"{call.dtype}[{call.numel}]" if call.dtype else ""
        words = (call.op, call.label, seen.detail_text, payload, seen.context, seen.site)
        return cls(seen.sequence, *words, seen.state)

    @property
    def arguments(self) -> tuple[str, str, str]:
        """Arguments that must be equal on all ranks; else the collective hangs or returns wrong numbers."""
        return self.op, self.detail, self.payload

    @property
    def is_waited_for(self) -> bool:
        return self.state in (CallState.WAITING, CallState.FAILED)

    def __str__(self) -> str:
        words = (self.op, self.detail, repr(self.label) if self.label else "", self.payload and f"of {self.payload}")
        return " ".join(filter(None, words))

    @property
    def origin(self) -> str:
        """Context and source line, to follow the call in a message; may be empty."""
        parts = ", ".join(filter(None, (self.context, self.site and f"issued at {self.site}")))
        return f" ({parts})" if parts else ""


@attrs.frozen
class GroupReport:
    """Fingerprints of one rank in one group."""

    name: str  # torch's name of the group, the same on its ranks
    title: str  # the group in messages
    ranks: tuple[int, ...]  # members, as global ranks
    issued: int  # number of collectives so far
    entries: tuple[CallSummary, ...]  # the most recent, in order of issue

    @classmethod
    def of(cls, ring: Ring) -> GroupReport:
        seen = ring.entries()
        issued = seen[-1].sequence if seen else 0
        return cls(ring.name, ring.title, ring.ranks, issued, tuple(CallSummary.of(one) for one in seen[-_RECENT:]))

    def entry(self, sequence: int) -> CallSummary | None:
        return next((entry for entry in self.entries if entry.sequence == sequence), None)

    @property
    def waiting(self) -> CallSummary | None:
        """The first collective that this rank waits for, or that failed on it."""
        return next((entry for entry in self.entries if entry.is_waited_for), None)


@attrs.frozen(kw_only=True)
class Report:
    """Report of one rank."""

    rank: int
    world_size: int
    answer: Answer = Answer.REPORTED
    note: str = ""  # about the answer: "process 4711 of this host"
    context: str = ""  # its open contexts
    stack: tuple[str, ...] = ()  # of its main thread, innermost first
    groups: tuple[GroupReport, ...] = ()

    def group(self, name: str) -> GroupReport | None:
        return next((group for group in self.groups if group.name == name), None)

    @property
    def position(self) -> str:
        """Context and stack in one line; may be empty."""
        return ", ".join(filter(None, (self.context, " < ".join(self.stack))))

    def to_json(self) -> str:
        return json.dumps(attrs.asdict(self, value_serializer=_plain))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        found = json.loads(text)
        groups = tuple(_group(group) for group in found.pop("groups"))
        answer, stack = Answer(found.pop("answer")), tuple(found.pop("stack"))
        return cls(answer=answer, stack=stack, groups=groups, **found)


def ranges(ranks: Iterable[int]) -> str:
    """Ranks as text: "0", "0, 2" or "0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(words)


def _plain(_: Any, __: Any, value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _group(found: dict[str, Any]) -> GroupReport:
    entries = tuple(CallSummary(**{**entry, "state": CallState(entry["state"])}) for entry in found["entries"])
    return GroupReport(**{**found, "ranks": tuple(found["ranks"]), "entries": entries})
