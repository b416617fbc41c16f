"""The queue of a group: order, who carries out, interruptions, failures.  Without ranks: the steps are made up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from zcomm.shared.failure import SharedMemoryFailed
from zcomm.shared.lane import Lane, Step

CLOSED = "this rank has closed the group."


class FakeStep:
    """A step whose wait does what the test says."""

    def __init__(self, on_wait: Callable[[], object] = lambda: None) -> None:
        self.on_wait = on_wait

    def wait(self) -> None:
        self.on_wait()


def raises(error: BaseException) -> Callable[[], object]:
    def throw() -> None:
        raise error

    return throw


def lane() -> tuple[Lane, list[str]]:
    """A lane, and what it and its tasks have done."""
    log: list[str] = []
    return Lane(lambda: log.append("gave up")), log


def steps(log: list[str], name: str, num: int = 2) -> Iterator[Step]:
    for number in range(num):
        log.append(f"{name}{number}")
        yield FakeStep()


def test_whoever_waits_carries_out_what_comes_before_too() -> None:
    found, log = lane()
    first, second, third = (found.issue(steps(log, name)) for name in "abc")
    assert log == []
    second.wait()
    assert log == ["a0", "a1", "b0", "b1"]
    assert [task.is_completed() for task in (first, second, third)] == [True, True, False]
    first.wait()
    third.wait()
    assert log[4:] == ["c0", "c1"]
    assert found.thread is None


def test_what_overlaps_is_carried_out_by_a_thread_and_nothing_after_it() -> None:
    found, log = lane()
    ended = threading.Event()

    def last() -> Iterator[Step]:
        yield FakeStep(ended.set)

    found.issue(steps(log, "a"))
    overlapping = found.issue(last(), overlap=True)
    later = found.issue(steps(log, "b"))
    assert ended.wait(20)
    overlapping.wait()
    assert log == ["a0", "a1"]
    later.wait()
    assert log == ["a0", "a1", "b0", "b1"]
    assert found.thread is not None
    assert not found.close(CLOSED)
    found.join()
    assert found.thread is None


def test_a_caller_waits_for_the_thread_that_is_at_its_collective() -> None:
    found, log = lane()
    is_begun, may_end = threading.Event(), threading.Event()

    def slow() -> Iterator[Step]:
        is_begun.set()
        yield FakeStep(lambda: may_end.wait(20))
        log.append("slow")

    task = found.issue(slow(), overlap=True)
    assert is_begun.wait(20)
    threading.Timer(0.25, may_end.set).start()
    task.wait()
    assert log == ["slow"]
    found.close(CLOSED)
    found.join()


def test_waiting_for_a_while_leaves_the_work_to_the_thread_and_says_whether_it_is_over() -> None:
    found, log = lane()
    may_end = threading.Event()
    task = found.issue(iter([FakeStep(lambda: may_end.wait(20))]))
    assert not task.help_for(0.0)
    assert not task.help_for(0.01)
    may_end.set()
    assert task.help_for(20.0)
    assert task.is_done
    failing = found.issue(iter([FakeStep(raises(SharedMemoryFailed("rank 3 has died.")))]))
    assert failing.help_for(20.0), "it is over, and not well"
    assert log == ["gave up"]
    found.join()


def test_an_interrupted_wait_leaves_the_collective_to_the_next() -> None:
    found, log = lane()
    outcomes = iter([raises(KeyboardInterrupt()), lambda: log.append("waited")])

    def interrupted() -> Iterator[Step]:
        yield FakeStep(lambda: next(outcomes)())
        log.append("end")

    task = found.issue(interrupted())
    with pytest.raises(KeyboardInterrupt):
        task.wait()
    assert not task.is_completed()
    found.issue(steps(log, "b", 1)).wait()
    assert log == ["waited", "end", "b0"]
    assert task.is_completed()


def test_an_interruption_between_two_steps_makes_the_group_unusable() -> None:
    found, log = lane()

    def torn() -> Iterator[Step]:
        yield FakeStep()
        raise KeyboardInterrupt

    task = found.issue(torn(), label="weights")
    with pytest.raises(KeyboardInterrupt):
        task.wait()
    with pytest.raises(SharedMemoryFailed, match="it was interrupted on this rank between two of its steps"):
        task.wait()
    assert log == ["gave up"]


@pytest.mark.parametrize("error", [SharedMemoryFailed("rank 3 has died."), MemoryError("rank 3 has died.")])
def test_a_failure_is_told_to_others_once_and_to_every_later_call(error: Exception) -> None:
    found, log = lane()
    failing = found.issue(iter([FakeStep(raises(error))]), label="grad[7]")
    queued = found.issue(steps(log, "b"))
    for _ in range(2):
        with pytest.raises(SharedMemoryFailed, match=r"^rank 3 has died\.$"):
            failing.wait()
    since = r"^rank 3 has died\. The group is unusable since 'grad\[7\]'\.$"
    with pytest.raises(SharedMemoryFailed, match=since):
        queued.wait()
    with pytest.raises(SharedMemoryFailed, match=since):
        found.issue(steps(log, "c"))
    assert log == ["gave up"]
    assert failing.is_completed()
    assert queued.is_completed()
    assert not found.close(CLOSED)


def test_closing_says_whether_something_was_under_way() -> None:
    found, log = lane()
    task = found.issue(steps(log, "a"))
    assert found.close(CLOSED)
    with pytest.raises(SharedMemoryFailed, match="this rank has closed the group"):
        task.wait()
    found.join()
    assert log == []
    assert not found.tasks
