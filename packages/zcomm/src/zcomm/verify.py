"""Verify mode: `ZCOMM_VERIFY=1` makes the ranks compare fingerprints before every collective.

Gloo gives a wrong sum, and no error, when ranks swap two all_reduces or reduce by different operations; it aborts the
process, which then says nothing, when one of two messages is longer than the other; and it waits for its time-out
when a rank skips a collective.  In this mode a rank writes what it is about to do into the store, waits
for the other members of the group, and raises before any data moves.  It costs a round trip through the store for
each collective (milliseconds), makes the issue of an asynchronous collective wait for the slowest rank, and asks for
what is otherwise only wise: that all ranks issue the collectives of *different* groups in one order too, and give
the same labels.

Rejected: a hash of the last N collectives now and then, which is cheaper and finds the first difference N
collectives too late; a Gloo gather, which mixes with the collectives that it guards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, final

import attrs

from zcomm import compat
from zcomm.fingerprint import Fingerprint
from zcomm.line import Line
from zcomm.report import Entry

_FIRST_LOOK_S, _LAST_LOOK_S = 0.0005, 0.02  # pauses between looks at the store grow from one to the other


def trust(_: Fingerprint) -> None:
    """The identity: ask nobody."""


@final
@attrs.define(eq=False)
class Verifier:
    """Compares before every collective.  Keys of a collective are deleted once all ranks have passed the next."""

    line: Line  # names the rank and the world's key space
    is_condemned: Callable[[], bool]  # whether waiting has become senseless
    store: Any = attrs.field(init=False)  # a connection of its own: the line's is looked at by a thread

    def __attrs_post_init__(self) -> None:
        self.store = compat.clone_store(self.line.store)

    def agree(self, entry: Fingerprint) -> None:
        """Return when all ranks of the group are about to issue this same collective.

        Raises RuntimeError naming the ranks that come with another one, or that do not come in time.
        """
        ring, rank = entry.ring, self.line.rank
        self.store.set(self._key(entry, entry.sequence, rank), json.dumps(_asked(entry)))
        for other in ring.ranks:
            self._await(entry, other)
        found = {other: self.store.get(self._key(entry, entry.sequence, other)) for other in ring.ranks}
        if entry.sequence > 1:
            self.store.delete_key(self._key(entry, entry.sequence - 1, rank))
        asked = {other: " ".join(filter(None, json.loads(text))) for other, text in found.items()}
        if len(set(asked.values())) > 1:
            said = "; ".join(f"rank {other} {text}" for other, text in asked.items())
            raise RuntimeError(f"before it began, the ranks came with different collectives: {said}.")

    def _await(self, entry: Fingerprint, rank: int) -> None:
        key = self._key(entry, entry.sequence, rank)
        began_s, pause_s = time.monotonic(), _FIRST_LOOK_S
        while not self.store.check([key]):
            if self.is_condemned():
                raise RuntimeError("given up, because another rank has failed.")
            if time.monotonic() - began_s > entry.ring.timeout_s:
                raise RuntimeError(f"before it began, rank {rank} did not come within {entry.ring.timeout_s:g} s.")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)

    def _key(self, entry: Fingerprint, sequence: int, rank: int) -> str:
        return f"{self.line.number}/verify/{entry.ring.name}/{sequence}/{rank}"


def _asked(entry: Fingerprint) -> list[str]:
    """What the ranks must have in common."""
    words = Entry.of(entry)
    return [*words.asks, repr(words.label) if words.label else ""]
