"""The queue of a group: order, who carries out, interruptions, failures.  Without ranks: the steps are made up."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

from zcomm.shared.failure import SharedMemoryFailed
from zcomm.shared.task_queue import Step, Task, TaskQueue

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


def queue() -> tuple[TaskQueue, list[str]]:
    """A queue, and a log of its tasks."""
    log: list[str] = []
    return TaskQueue(lambda: log.append("gave up")), log


def steps(log: list[str], name: str, num: int = 2) -> Iterator[Step]:
    for number in range(num):
        log.append(f"{name}{number}")
        yield FakeStep()


def test_a_thread_that_waits_runs_earlier_tasks_too() -> None:
    found, log = queue()
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
    found, log = queue()
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
    found, log = queue()
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


def test_waiting_for_a_while_leaves_the_work_to_the_thread_and_returns_whether_it_is_over() -> None:
    found, log = queue()
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
    found, log = queue()
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
    found, log = queue()

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
def test_a_failure_informs_the_others_once_and_fails_every_later_call(error: Exception) -> None:
    found, log = queue()
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


def test_closing_returns_whether_a_task_was_in_flight() -> None:
    found, log = queue()
    task = found.issue(steps(log, "a"))
    assert found.close(CLOSED)
    with pytest.raises(SharedMemoryFailed, match="this rank has closed the group"):
        task.wait()
    found.join()
    assert log == []
    assert not found.tasks


def interrupted_wait(task: Task, at_line: int) -> bool:
    """Wait with a KeyboardInterrupt at the n-th line of the queue's that is run; False if there are fewer.

    Not at a `with`: Python itself sees to it that no signal comes between its two halves and what is in it.
    """
    lines = iter(range(at_line + 1))

    def trace(frame: FrameType, event: str, _argument: object) -> object:
        if frame.f_globals["__name__"] != TaskQueue.__module__:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not line.startswith("with ") and next(lines, None) == at_line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        task.wait()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)


def test_an_interruption_at_any_line_leaves_no_other_thread_waiting() -> None:
    for at_line in range(1000):
        found, log = queue()
        task = found.issue(steps(log, "a"))
        if not interrupted_wait(task, at_line):
            break
        outcomes: list[str] = []

        def wait_again(task: Task = task, outcomes: list[str] = outcomes) -> None:
            try:
                task.wait()
                outcomes.append("done")
            except SharedMemoryFailed as error:
                outcomes.append(str(error))

        thread = threading.Thread(target=wait_again, daemon=True)
        thread.start()
        thread.join(20)
        assert outcomes in (["done"], ["it was interrupted on this rank between two of its steps."]), at_line
    assert at_line > 30, "there are so many lines"
    assert log == ["a0", "a1"]


def test_closing_while_another_thread_carries_out_ends_its_wait_without_a_mishap() -> None:
    for is_late in (False, True):
        found, log = queue()
        is_begun, may_end, outcomes = threading.Event(), threading.Event(), []

        def slow(is_begun: threading.Event = is_begun, may_end: threading.Event = may_end) -> Iterator[Step]:
            is_begun.set()
            yield FakeStep(lambda: may_end.wait(20))

        task, later = found.issue(slow()), found.issue(steps(log, "b"))

        def wait(task: Task = task, outcomes: list[str] = outcomes) -> None:
            try:
                task.wait()
                outcomes.append("done")
            except BaseException as error:
                outcomes.append(repr(error))

        thread = threading.Thread(target=wait)
        thread.start()
        assert is_begun.wait(20)
        if is_late:
            threading.Timer(0.1, may_end.set).start()
        assert found.close(CLOSED)
        found.join()
        may_end.set()
        thread.join(20)
        assert outcomes == ["done"]
        assert not found.tasks
        with pytest.raises(SharedMemoryFailed, match="this rank has closed the group"):
            later.wait()
        assert log == []


def test_after_a_failure_no_tensor_is_held_though_the_tasks_are() -> None:
    found, _ = queue()
    tensors = [torch.zeros(10), torch.zeros(10)]
    alive = [weakref.ref(tensor) for tensor in tensors]

    def holding(tensor: torch.Tensor) -> Iterator[Step]:
        yield FakeStep(raises(SharedMemoryFailed("rank 3 has died.")))
        tensor.add_(1)

    failing, queued = (found.issue(holding(tensor), label="g") for tensor in tensors)
    tensors.clear()
    with pytest.raises(SharedMemoryFailed, match=r"^rank 3 has died\.$"):
        failing.wait()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    for _ in range(2):
        with pytest.raises(SharedMemoryFailed, match=r"^rank 3 has died\.$"):
            failing.wait()
        with pytest.raises(SharedMemoryFailed, match="since 'g'"):
            queued.wait()


def test_a_forked_child_neither_carries_out_nor_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    found, log = queue()
    parent, task = os.getpid(), found.issue(steps(log, "a"))
    done = found.issue(steps([], "b"))
    found.changed.acquire()  # as a thread of the parent may have, at the fork
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    outcomes: list[object] = []

    def look() -> None:
        outcomes.extend([task.is_completed(), task.help_for(100.0)])
        with pytest.raises(SharedMemoryFailed, match=f"was forked from process {parent}, which is the member"):
            task.wait()
        outcomes.append(done.is_done)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(20)
    assert outcomes == [True, True, False]
    assert log == []
    found.changed.release()
    monkeypatch.undo()
    task.wait()
    assert log == ["a0", "a1"]
