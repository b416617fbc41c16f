"""What one rank tells the others when a collective has failed: its fingerprints and where it stands, as values.

A report travels as JSON through the store by which the ranks met, so that it needs neither the group that is stuck
nor a pickle.  A rank that cannot speak gets a report from the rank that asked, so the analysis (`diagnosis.py`) is a
function of reports and of nothing else.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from typing import Any

import attrs

from zcomm.fingerprint import Fingerprint, Ring, State

_RECENT = 64  # fingerprints a group that travel: 10 kB, and a mismatch is rarely older


class Answer(enum.Enum):
    """How a rank answered."""

    TOLD = "told"  # by its own report
    LEFT = "left"  # it closed its world, or destroyed the default group, and said so
    GONE = "gone"  # its process does not exist any more
    SILENT = "silent"  # no report came in time


@attrs.frozen
class Entry:
    """One fingerprint in words."""

    sequence: int  # place in the group's order of issue, from 1
    op: str
    label: str
    detail: str  # "sum", "from rank 3", or nothing
    payload: str  # "float32[4]", by its number of elements; nothing for a barrier
    context: str  # what the caller said it was doing
    site: str  # line of the user's program
    state: State

    @classmethod
    def of(cls, seen: Fingerprint) -> Entry:
        call = seen.call
        payload = f"{call.dtype}[{call.numel}]" if call.dtype else ""
        words = (call.op, call.label, seen.detail_text, payload, seen.context, seen.site)
        return cls(seen.sequence, *words, seen.state)

    @property
    def asks(self) -> tuple[str, str, str]:
        """What all ranks of a collective must agree on, or it hangs or gives wrong numbers."""
        return self.op, self.detail, self.payload

    @property
    def is_waited_for(self) -> bool:
        return self.state in (State.WAITING, State.FAILED)

    def __str__(self) -> str:
        words = (self.op, self.detail, repr(self.label) if self.label else "", self.payload and f"of {self.payload}")
        return " ".join(filter(None, words))

    @property
    def origin(self) -> str:
        """Context and line, to be put after the entry; may be empty."""
        told = ", ".join(filter(None, (self.context, self.site and f"issued at {self.site}")))
        return f" ({told})" if told else ""


@attrs.frozen
class GroupReport:
    """One rank's fingerprints of one group."""

    name: str  # torch's name of the group, the same on its ranks
    title: str  # the group in words
    ranks: tuple[int, ...]  # members, as ranks of the world
    issued: int  # collectives of this group so far
    entries: tuple[Entry, ...]  # the last of them, in order of issue

    @classmethod
    def of(cls, ring: Ring) -> GroupReport:
        seen = ring.entries()
        issued = seen[-1].sequence if seen else 0
        return cls(ring.name, ring.title, ring.ranks, issued, tuple(Entry.of(one) for one in seen[-_RECENT:]))

    def entry(self, sequence: int) -> Entry | None:
        return next((entry for entry in self.entries if entry.sequence == sequence), None)

    @property
    def waiting(self) -> Entry | None:
        """The first collective that this rank waits for, or that failed there."""
        return next((entry for entry in self.entries if entry.is_waited_for), None)


@attrs.frozen(kw_only=True)
class Report:
    """One rank."""

    rank: int
    world_size: int
    answer: Answer = Answer.TOLD
    note: str = ""  # about the answer: "process 4711 of this host", "no answer within 4 s"
    context: str = ""  # what its process is doing, as far as it said
    stack: tuple[str, ...] = ()  # where its main thread is, innermost first
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
    """Ranks in words: "0", "0, 2" or "0-3, 7"."""
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
    entries = tuple(Entry(**{**entry, "state": State(entry["state"])}) for entry in found["entries"])
    return GroupReport(**{**found, "ranks": tuple(found["ranks"]), "entries": entries})
