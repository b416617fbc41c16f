"""Collectives of several steps, one after the other, in the order of issue.

A collective in two levels is a generator: it issues a step, yields it, and goes on when the step has ended.  The
steps of one collective must come in one order on all ranks, and so must the collectives; so each group has one
lane, which carries out the first in its queue and nothing else, whatever handle is waited for.  Who carries it out is
as in csrc/zs_engine.c: whoever waits, or the lane's thread where the caller goes on computing.  A wait that
is interrupted leaves the collective where it was, for the next that comes.

Rejected: the second level at the wait of its own handle, since ranks may wait in different orders; a thread for all,
which makes every synchronous call pay for two hand-overs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, final

import attrs

from zcomm import doctor
from zcomm.shared.failure import SharedMemoryFailed

__all__ = ["Lane", "Step", "Task"]

_NAP_S = 0.1  # of a caller whose collective another thread carries out


class Step(Protocol):
    """Something that was issued."""

    def wait(self) -> None:
        """Raises SharedMemoryFailed.  May be interrupted, and called again."""


@final
@attrs.define(eq=False)
class Task:
    """A collective in the queue.

    Invariant: `steps` is exhausted, and holds no tensor, when it is done.
    """

    lane: Lane
    steps: Iterator[Step]
    label: str
    number: int  # in the order of issue, from 1
    pending: Step | None = None  # issued and not yet waited for
    is_done: bool = False

    def wait(self) -> None:
        self.lane.wait(self)

    def is_completed(self) -> bool:
        return self.is_done or bool(self.lane.failure)

    def help_for(self, seconds: float) -> bool:
        """Whether it is over, well or not, within that time.  The thread does the work."""
        return self.lane.await_thread(self, seconds)


@final
@attrs.define(eq=False)
class Lane:
    """The queue of one group.

    Invariant: `failure`, once set, stays; then nothing is carried out any more.
    """

    at_failure: Callable[[], None]  # tells the other ranks
    tasks: deque[Task] = attrs.field(factory=deque)
    num_issued: int = 0
    num_wanted: int = 0  # tasks up to this number are the thread's to carry out
    is_busy: bool = False  # somebody carries out the first task
    failure: str = ""  # why the group is unusable
    failed: Task | None = None  # the one that failed
    thread: threading.Thread | None = None  # made when there is something for it
    news: threading.Condition = attrs.field(factory=threading.Condition)  # guards all above

    def issue(self, steps: Iterator[Step], *, label: str = "", overlap: bool = False) -> Task:
        """Append a collective.  Raises SharedMemoryFailed if the group is unusable."""
        with self.news:
            self._check(None)
            self.num_issued += 1
            task = Task(self, steps, label, self.num_issued)
            self.tasks.append(task)
            if overlap:
                self._leave_to_thread(task)
        return task

    def wait(self, task: Task) -> None:
        """Return when the task is done, carrying out what is before it and itself.  Raises SharedMemoryFailed."""
        while True:
            with self.news:
                if task.is_done:
                    return
                self._check(task)
                is_ours = not self.is_busy
                self.is_busy = True
                if not is_ours:
                    self.news.wait(_NAP_S)
            if is_ours:
                self._carry_out_first()
            elif doctor.is_condemned():
                raise SharedMemoryFailed("given up, because a collective has failed on another rank.")

    def await_thread(self, task: Task, seconds: float) -> bool:
        """Let the thread carry out what is before a task and itself, for that long at most; whether it is over."""
        with self.news:
            self._leave_to_thread(task)
            return self.news.wait_for(task.is_completed, max(0.0, seconds))

    def close(self, reason: str) -> bool:
        """Let nothing further begin.  Whether something was under way, whose step the caller must end."""
        with self.news:
            was_busy = bool(self.tasks) and not self.failure
            self.failure = self.failure or reason
            self.news.notify_all()
        return was_busy

    def join(self) -> None:
        """Wait for the thread, after `close`."""
        thread, self.thread = self.thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.tasks.clear()

    def _leave_to_thread(self, task: Task) -> None:
        """With the lock held."""
        if self.failure:
            return
        self.num_wanted = max(self.num_wanted, task.number)
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, daemon=True, name="zcomm-lane")
            self.thread.start()
        self.news.notify_all()

    def _serve(self) -> None:
        """The thread."""
        while True:
            with self.news:
                while not self.failure and (self.is_busy or not self.tasks or self.tasks[0].number > self.num_wanted):
                    self.news.wait()
                if self.failure:
                    return
                self.is_busy = True
            self._carry_out_first()

    def _carry_out_first(self) -> None:
        """By whoever has set `is_busy`."""
        task, outcome = self.tasks[0], _Outcome(is_over=False)
        try:
            outcome = _carried_out(task)
            if outcome.error and not self.failure:
                self.at_failure()
        finally:
            with self.news:
                self.is_busy = False
                if outcome.error:
                    self.failure, self.failed = self.failure or outcome.error, self.failed or task
                    self.tasks.clear()
                elif outcome.is_over:
                    task.is_done = True
                    self.tasks.popleft()
                self.news.notify_all()

    def _check(self, task: Task | None) -> None:
        """With the lock held: raise if the group is unusable."""
        if self.failure:
            is_later = self.failed is not None and self.failed is not task
            since = repr(self.failed.label) if self.failed and self.failed.label else "an earlier collective"
            raise SharedMemoryFailed(self.failure + (f" The group is unusable since {since}." if is_later else ""))


@attrs.frozen
class _Outcome:
    is_over: bool  # done, or failed
    error: str = ""


def _carried_out(task: Task) -> _Outcome:
    """Go on with a task to its end, or to its error.  An interruption passes through and leaves it where it was."""
    try:
        while True:
            if task.pending is not None:
                task.pending.wait()
                task.pending = None
            task.pending = next(task.steps)
    except StopIteration:
        return _Outcome(is_over=True)
    except Exception as error:
        return _Outcome(is_over=True, error=str(error) or repr(error))
    except BaseException:
        if task.pending is None:
            task.steps = _torn()
        raise


def _torn() -> Iterator[Step]:
    """What is left of a collective that was interrupted while it issued a step: nobody knows whether it did."""
    yield from ()
    raise SharedMemoryFailed("it was interrupted on this rank between two of its steps.")
