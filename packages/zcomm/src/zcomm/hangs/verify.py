"""Verify mode: `ZCOMM_VERIFY=1` makes the ranks compare fingerprints before every collective.

Gloo returns a wrong sum, and no error, when ranks swap two all_reduces or reduce by different operations; it aborts
the process without a message when one of two messages is longer than the other; and it waits for its time-out when a
rank skips a collective.  In verify mode a rank writes the collective into the store, waits for the other members of
the group, and raises before any data moves.  The price: one round trip through the store per collective
(milliseconds), an asynchronous issue that waits for the slowest rank, and two stricter rules: all ranks issue the
collectives of *different* groups in one order too, and with equal labels.

Rejected: a hash of every N collectives (cheaper, but reports the first difference up to N collectives too late);
a Gloo gather (it mixes with the collectives that it guards).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, final

import attrs

from zcomm import compat
from zcomm.hangs.fingerprint import Fingerprint
from zcomm.hangs.observer import ABORTED
from zcomm.hangs.report import CallSummary
from zcomm.hangs.side_channel import SideChannel

_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.02  # pauses between polls of the store grow from one to the other


def no_verification(_: Fingerprint) -> None:
    """Accept every collective."""


@final
@attrs.define(eq=False)
class Verifier:
    """Compares the ranks before every collective.  Keys are deleted once all ranks have passed the next one."""

    channel: SideChannel  # names the rank and the world's key space
    is_aborted: Callable[[], bool]  # ends the wait
    store: Any = attrs.field(init=False)  # a connection of its own: a thread polls the channel's

    def __attrs_post_init__(self) -> None:
        self.store = compat.clone_store(self.channel.store)

    def verify(self, fingerprint: Fingerprint) -> None:
        """Return when all ranks of the group are about to issue this same collective.

        Raises RuntimeError naming the ranks that issue another one, or that do not come in time.
        """
        ring, rank = fingerprint.ring, self.channel.rank
        self.store.set(self._key(fingerprint, fingerprint.sequence, rank), json.dumps(_arguments(fingerprint)))
        for other in ring.ranks:
            self._await(fingerprint, other)
        found = {other: self.store.get(self._key(fingerprint, fingerprint.sequence, other)) for other in ring.ranks}
        if fingerprint.sequence > 1:
            self.store.delete_key(self._key(fingerprint, fingerprint.sequence - 1, rank))
        calls = {other: " ".join(filter(None, json.loads(text))) for other, text in found.items()}
        if len(set(calls.values())) > 1:
            listed = "; ".join(f"rank {other} {text}" for other, text in calls.items())
            raise RuntimeError(f"not issued: the ranks called different collectives: {listed}.")

    def _await(self, fingerprint: Fingerprint, rank: int) -> None:
        key = self._key(fingerprint, fingerprint.sequence, rank)
        began_s, pause_s = time.monotonic(), _FIRST_POLL_S
        while not self.store.check([key]):
            if self.is_aborted():
                raise RuntimeError(ABORTED)
            if time.monotonic() - began_s > fingerprint.ring.timeout_s:
                limit_s = fingerprint.ring.timeout_s
                raise RuntimeError(f"not issued: rank {rank} did not reach this collective within {limit_s:g} s.")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    def _key(self, fingerprint: Fingerprint, sequence: int, rank: int) -> str:
        return f"{self.channel.number}/verify/{fingerprint.ring.name}/{sequence}/{rank}"


def _arguments(fingerprint: Fingerprint) -> list[str]:
    """Arguments that must be equal on all ranks."""
    words = CallSummary.of(fingerprint)
    return [*words.arguments, repr(words.label) if words.label else ""]
