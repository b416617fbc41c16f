"""A heartbeat lock, for stores without locks.

An object names the owner and holds a counter that the owner increments every few seconds.  A job that finds the
object watches it on its own clock: a counter that moves belongs to a live job; one that does not move for `timeout_s`
belongs to a dead job, and its lock is taken over.  Clocks of the store or of other machines are never compared.
After a crash the first save waits `timeout_s`; after a release it does not wait.

This is not strict mutual exclusion: two jobs that take over one dead lock at the same time may both hold it briefly,
and a job that is suspended for longer than the timeout loses it.  So correctness never depends on the lock alone:
attempts never share a folder (rename_marker.py), and a commit first checks that the lock is still held.  The lock
lets a second job fail early, and leftovers be swept.
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

    heartbeat_s: float = 4.0  # between two heartbeats
    timeout_s: float = 15.0  # without a heartbeat, the owner counts as dead; several heartbeats


DEFAULT_LOCK_POLICY = LockPolicy()


@attrs.frozen
class LockObject:
    """The store object behind a lock, as three functions that raise OSError."""

    path: Path
    read: Callable[[], str]  # "" only if the object does not exist; it may be half written
    write: Callable[[str], None]
    remove: Callable[[], None]


@final
@attrs.define(eq=False)
class HeartbeatLock:
    """A held lock; `acquire` makes one."""

    lock_object: LockObject
    owner: str
    lock_policy: LockPolicy
    nonce: str = attrs.field(factory=lambda: secrets.token_hex(8))
    is_exclusive: bool = True
    released: threading.Event = attrs.field(factory=threading.Event)
    heartbeat: threading.Thread | None = None
    writing: threading.Lock = attrs.field(factory=threading.Lock)  # a half-written heartbeat is never read

    def release(self) -> None:
        if self.released.is_set():
            return
        self.released.set()
        if self.heartbeat is not None:
            self.heartbeat.join()
        with contextlib.suppress(OSError):  # the lock then goes stale, and the next job waits for the timeout
            if self.is_ours():
                self.lock_object.remove()

    def is_ours(self) -> bool:
        return self.lock_object.read().startswith(self.nonce)

    def check_held(self) -> None:
        """Raise OSError if another job has taken the lock."""
        with self.writing:
            text = self.lock_object.read()
        if not text.startswith(self.nonce):
            holder = _owner(text) or "no job"
            raise OSError(
                errno.EBUSY, f"the lock was lost while saving; it is held by {holder}", str(self.lock_object.path)
            )

    def write_heartbeat(self, count: int) -> None:
        self.lock_object.write(f"{self.nonce} {count}\n{self.owner}\n")

    def _run_heartbeat(self) -> None:
        count = 1
        while not self.released.wait(self.lock_policy.heartbeat_s):
            with contextlib.suppress(OSError), self.writing:  # a failed heartbeat is skipped; the next may succeed
                if not self.is_ours():
                    return
                self.write_heartbeat(count)
                count += 1


def acquire(lock_object: LockObject, owner: str, lock_policy: LockPolicy) -> HeartbeatLock:
    """Acquire the lock, after `timeout_s` if its owner is dead; raises BlockingIOError with the live owner's text."""
    _wait_until_stale(lock_object, lock_policy)
    lock = HeartbeatLock(lock_object, owner, lock_policy)
    lock.write_heartbeat(0)
    if not lock.is_ours():
        raise _held_error(lock_object)
    lock.heartbeat = threading.Thread(target=lock._run_heartbeat, name="zckpt-lock", daemon=True)
    lock.heartbeat.start()
    return lock


def _wait_until_stale(lock_object: LockObject, lock_policy: LockPolicy) -> None:
    """Return when there is no lock, or when it had no heartbeat for `timeout_s`."""
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
