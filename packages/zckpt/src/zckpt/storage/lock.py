"""A lock on a store that has none.

An object names the owner and carries a counter that the owner raises every few seconds.  Who finds one watches it
for a while on its own clock: a counter that moves is a living job, one that stands still a dead one, whose lock is
taken over.  No clock of the store or of another machine is ever compared.  After a crash the first save waits
`patience_s`; after a release nobody waits.

This is no mutual exclusion in the strict sense: two jobs that take over one dead lock at the same moment may both
think that they have it for a moment, and a job that is suspended for longer than the patience loses it.  So nothing
sound rests on it alone: attempts never share a folder (rename_marker.py), and a commit first asks whether the lock is
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
class LockPolicy:
    """Heartbeat interval and timeout of a lock."""

    heartbeat_s: float = 4.0  # between two signs of life
    timeout_s: float = 15.0  # without one, the owner is dead; several beats


DEFAULT_LOCK_POLICY = LockPolicy()


@attrs.frozen
class LockObject:
    """The object that is the lock, as three calls that raise OSError."""

    path: Path
    read: Callable[[], str]  # "" if it is not there; never if it is, though it may be half written
    write: Callable[[str], None]
    remove: Callable[[], None]


@final
@attrs.define(eq=False)
class HeartbeatLock:
    """A held lock.  `take` makes one."""

    lock_object: LockObject
    owner: str
    lock_policy: LockPolicy
    nonce: str = attrs.field(factory=lambda: secrets.token_hex(8))
    is_exclusive: bool = True
    released: threading.Event = attrs.field(factory=threading.Event)
    heartbeat: threading.Thread | None = None
    writing: threading.Lock = attrs.field(factory=threading.Lock)  # half a sign of ours is not another's

    def release(self) -> None:
        if self.released.is_set():
            return
        self.released.set()
        if self.heartbeat is not None:
            self.heartbeat.join()
        with contextlib.suppress(OSError):  # it then goes stale, which costs the next job its patience
            if self.is_ours():
                self.lock_object.remove()

    def is_ours(self) -> bool:
        return self.lock_object.read().startswith(self.nonce)

    def check_held(self) -> None:
        """OSError if another job has taken the lock."""
        with self.writing:
            text = self.lock_object.read()
        if not text.startswith(self.nonce):
            holder = _owner(text) or "nobody"
            raise OSError(
                errno.EBUSY, f"the lock was lost while saving; it is held by {holder}", str(self.lock_object.path)
            )

    def write_heartbeat(self, count: int) -> None:
        self.lock_object.write(f"{self.nonce} {count}\n{self.owner}\n")

    def _run_heartbeat(self) -> None:
        count = 1
        while not self.released.wait(self.lock_policy.heartbeat_s):
            with (
                contextlib.suppress(OSError),
                self.writing,
            ):  # a beat that fails is a beat missed; the next one may work
                if not self.is_ours():
                    return
                self.write_heartbeat(count)
                count += 1


def acquire(lock_object: LockObject, owner: str, lock_policy: LockPolicy) -> HeartbeatLock:
    """The lock, at once or after watching a dead one; BlockingIOError with the owner's text if that is alive."""
    _wait_until_stale(lock_object, lock_policy)
    lock = HeartbeatLock(lock_object, owner, lock_policy)
    lock.write_heartbeat(0)
    if not lock.is_ours():
        raise _held_error(lock_object)
    lock.heartbeat = threading.Thread(target=lock._run_heartbeat, name="zckpt-lease", daemon=True)
    lock.heartbeat.start()
    return lock


def _wait_until_stale(lock_object: LockObject, lock_policy: LockPolicy) -> None:
    """Returns when there is no lock, or when it has shown no sign of life for the patience."""
    first, until = lock_object.read(), time.monotonic() + lock_policy.timeout_s
    while first and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, lock_policy.timeout_s / 10))
        now = lock_object.read()
        if not now:
            return
        if now != first:
            raise _held_error(lock_object)


def _held_error(lock_object: LockObject) -> BlockingIOError:
    return BlockingIOError(errno.EWOULDBLOCK, _owner(lock_object.read()) or "an unnamed owner", str(lock_object.path))


def _owner(text: str) -> str:
    return text.partition("\n")[2].strip()
