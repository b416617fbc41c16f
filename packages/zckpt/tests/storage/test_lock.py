import time
from pathlib import Path

import attrs
import pytest

from zckpt.storage.lock import HeartbeatLock, LockObject, LockPolicy, acquire

QUICK = LockPolicy(heartbeat_s=0.01, timeout_s=5.0)
STILL = LockPolicy(heartbeat_s=3600.0, timeout_s=0.02)


@attrs.define
class Cell:
    text: str = ""
    writes: int = 0

    def write(self, text: str) -> None:
        self.text, self.writes = text, self.writes + 1

    def lock_object(self) -> LockObject:
        return LockObject(Path("/.lock"), lambda: self.text, self.write, lambda: self.write(""))


def test_a_lock_is_taken_and_released() -> None:
    cell = Cell()
    lease = acquire(cell.lock_object(), "pid 7", STILL)
    assert cell.text.endswith(" 0\npid 7\n")
    lease.check_held()
    lease.release()
    lease.release()
    assert (cell.text, cell.writes) == ("", 2)


def test_a_living_owner_is_told_and_a_dead_one_replaced() -> None:
    cell = Cell()
    first = acquire(cell.lock_object(), "pid 7 on a", QUICK)
    with pytest.raises(BlockingIOError) as caught:
        acquire(cell.lock_object(), "pid 8", QUICK)
    assert (caught.value.strerror, caught.value.filename) == ("pid 7 on a", "/.lock")
    first.release()
    cell.text = "ffff 3\npid 9\n"  # nobody raises its counter
    second = acquire(cell.lock_object(), "pid 8", STILL)
    assert second.is_ours()
    second.release()


def test_one_whose_lock_was_taken_is_told_and_leaves_the_other_alone() -> None:
    cell = Cell()
    lease = acquire(cell.lock_object(), "pid 7", QUICK)
    cell.text = "ffff 3\npid 9\n"
    with pytest.raises(OSError, match="lost while saving; it is held by pid 9"):
        lease.check_held()
    assert lease.heartbeat is not None
    lease.heartbeat.join(5)
    assert not lease.heartbeat.is_alive(), "it no longer signs"
    lease.release()
    assert cell.text == "ffff 3\npid 9\n"


def test_half_a_sign_of_ones_own_is_not_anothers() -> None:
    """A store may show a half-written object, and the owner reads while its heartbeat thread writes."""
    cell = Cell()

    def write(text: str) -> None:
        cell.text = ""
        time.sleep(0.01)
        cell.write(text)

    lease = acquire(
        LockObject(Path("/.lock"), lambda: cell.text, write, lambda: None),
        "me",
        LockPolicy(heartbeat_s=0.0, timeout_s=1),
    )
    while cell.writes < 10:
        lease.check_held()
    lease.release()


def test_a_beat_that_fails_is_tried_again() -> None:
    cell = Cell()

    def failing(text: str) -> None:
        cell.writes += 1
        if cell.writes in (2, 3):
            raise OSError(5, "busy")
        cell.text = text

    lease = acquire(LockObject(Path("/.lock"), lambda: cell.text, failing, lambda: None), "me", QUICK)
    until = time.monotonic() + 5
    while cell.writes < 5 and time.monotonic() < until:
        time.sleep(0.005)
    assert isinstance(lease, HeartbeatLock)
    assert cell.text.split()[1] != "0"
    lease.release()


def test_two_that_take_a_dead_lock_at_once_do_not_both_have_it() -> None:
    cell = Cell()

    def write(text: str) -> None:
        cell.text = "ffff 0\nthe faster one\n"

    with pytest.raises(BlockingIOError, match="the faster one"):
        acquire(LockObject(Path("/.lock"), lambda: cell.text, write, lambda: None), "me", STILL)
