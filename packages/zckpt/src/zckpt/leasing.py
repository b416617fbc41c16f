"""A lock on a store that has none.

An object names the owner and carries a counter that the owner raises every few seconds.  Who finds one watches it
for a while on its own clock: a counter that moves is a living job, one that stands still a dead one, whose lock is
taken over.  No clock of the store or of another machine is ever compared.  After a crash the first save waits
`patience_s`; after a release nobody waits.

This is no mutual exclusion in the strict sense: two jobs that take over one dead lock at the same moment may both
think that they have it for a moment, and a job that is suspended for longer than the patience loses it.  So nothing
sound rests on it alone: attempts never share a folder (marking.py), and a commit first asks whether the lock is
still ours.  What it buys is that a second job is told, and that remains can be swept.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

import attrs


@attrs.frozen(kw_only=True)
class Leasing:
    """How long a lock without a sign of life is believed."""

    beat_s: float = 4.0  # between two signs of life
    patience_s: float = 15.0  # without one, the owner is dead; several beats


PATIENT = Leasing()


@attrs.frozen
class Slot:
    """The object that is the lock, as three calls that raise OSError."""

    path: Path
    read: Callable[[], str]  # "" if it is not there; never if it is, though it may be half written
    write: Callable[[str], None]
    remove: Callable[[], None]


@final
@attrs.define(eq=False)
class Lease:
    """A held lock.  `take` makes one."""

    slot: Slot
    owner: str
    leasing: Leasing
    nonce: str = attrs.field(factory=lambda: secrets.token_hex(8))
    is_exclusive: bool = True
    ended: threading.Event = attrs.field(factory=threading.Event)
    beating: threading.Thread | None = None
    signing: threading.Lock = attrs.field(factory=threading.Lock)  # half a sign of ours is not another's

    def release(self) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        if self.beating is not None:
            self.beating.join()
        with contextlib.suppress(OSError):  # it then goes stale, which costs the next job its patience
            if self.is_ours():
                self.slot.remove()

    def is_ours(self) -> bool:
        return self.slot.read().startswith(self.nonce)

    def confirm(self) -> None:
        """OSError if another job has taken the lock."""
        with self.signing:
            text = self.slot.read()
        if not text.startswith(self.nonce):
            holder = _owner(text) or "nobody"
            raise OSError(errno.EBUSY, f"the lock was lost while saving; it is held by {holder}", str(self.slot.path))

    def sign(self, count: int) -> None:
        self.slot.write(f"{self.nonce} {count}\n{self.owner}\n")

    def _beat(self) -> None:
        count = 1
        while not self.ended.wait(self.leasing.beat_s):
            with (
                contextlib.suppress(OSError),
                self.signing,
            ):  # a beat that fails is a beat missed; the next one may work
                if not self.is_ours():
                    return
                self.sign(count)
                count += 1


def take(slot: Slot, owner: str, leasing: Leasing) -> Lease:
    """The lock, at once or after watching a dead one; BlockingIOError with the owner's text if that is alive."""
    _watch(slot, leasing)
    lease = Lease(slot, owner, leasing)
    lease.sign(0)
    if not lease.is_ours():
        raise _held(slot)
    lease.beating = threading.Thread(target=lease._beat, name="zckpt-lease", daemon=True)
    lease.beating.start()
    return lease


def _watch(slot: Slot, leasing: Leasing) -> None:
    """Returns when there is no lock, or when it has shown no sign of life for the patience."""
    first, until = slot.read(), time.monotonic() + leasing.patience_s
    while first and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, leasing.patience_s / 10))
        now = slot.read()
        if not now:
            return
        if now != first:
            raise _held(slot)


def _held(slot: Slot) -> BlockingIOError:
    return BlockingIOError(errno.EWOULDBLOCK, _owner(slot.read()) or "an unnamed owner", str(slot.path))


def _owner(text: str) -> str:
    return text.partition("\n")[2].strip()
