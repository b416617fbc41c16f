"""Collectives of several steps, one after the other, in the order of issue.

A collective in two levels is a generator: it issues a step, yields it, and goes on when the step has ended.  The
steps of one collective must come in one order on all ranks, and so must the collectives; so each group has one
lane, which carries out the first in its queue and nothing else, whatever handle is waited for.  Who carries it out is
as in csrc/zs_engine.c: whoever waits, or the lane's thread where the caller goes on computing.  A wait that
is interrupted leaves the collective where it was, for the next that comes.  A forked child is no such next: the
connections are its parent's, and so may be the lock.

Rejected: the second level at the wait of its own handle, since ranks may wait in different orders; a thread for all,
which makes every synchronous call pay for two hand-overs.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, final

import attrs

from zcomm import doctor
from zcomm.shared.failure import SharedMemoryFailed, forked_from

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
        """Whether `wait` would return, or raise, at once."""
        return self.is_done or self.lane.is_over()

    def drop(self) -> None:
        """Let go of the tensors: it will not be carried out any further."""
        self.steps, self.pending = iter(()), None

    def help_for(self, seconds: float) -> bool:
        """Whether it is over, well or not, within that time.  The thread does the work."""
        return self.lane.await_thread(self, seconds)


@final
@attrs.define(eq=False)
class Lane:
    """The queue of one group.

    Invariant: `failure`, once set, stays; then nothing new is begun, and what ends is dropped with all that waits.
    """

    at_failure: Callable[[], None]  # tells the other ranks
    tasks: deque[Task] = attrs.field(factory=deque)
    num_issued: int = 0
    num_wanted: int = 0  # tasks up to this number are the thread's to carry out
    turn: _Turn | None = None  # of whoever carries out the first task
    failure: str = ""  # why the group is unusable
    failed: tuple[int, str] | None = None  # number and label of the task that failed
    pid: int = attrs.field(factory=os.getpid)  # of the process that may use it: a forked child may not
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
        while not task.is_done:
            if os.getpid() != self.pid:
                raise SharedMemoryFailed(forked_from(self.pid))
            if not self._take_turn(lambda: self._is_wanted(task)) and doctor.is_condemned():
                raise SharedMemoryFailed("given up, because another rank has failed.")

    def await_thread(self, task: Task, seconds: float) -> bool:
        """Let the thread carry out what is before a task and itself, for that long at most; whether it is over."""
        if task.is_completed():
            return True
        with self.news:
            self._leave_to_thread(task)
            return self.news.wait_for(task.is_completed, max(0.0, seconds))

    def is_over(self) -> bool:
        """Whether nothing is carried out any more, or not in this process."""
        return bool(self.failure) or os.getpid() != self.pid

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
        with self.news:
            self._drop_all()

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
        while not self.failure:
            self._take_turn(self._await_wanted)

    def _await_wanted(self) -> bool:
        """With the lock held: wait until the first task is the thread's to carry out; False if none is any more."""
        while not self.failure and (
            self.turn is not None or not self.tasks or self.tasks[0].number > self.num_wanted
        ):
            self.news.wait()
        return not self.failure

    def _is_wanted(self, task: Task) -> bool:
        """With the lock held: whether a task has still to be carried out.  Raises SharedMemoryFailed."""
        if not task.is_done:
            self._check(task)
        return not task.is_done

    def _take_turn(self, is_wanted: Callable[[], bool]) -> bool:
        """Carry out the first task if that `is_wanted`; False if somebody else is at it, after a little while.

        [Note: interruptions] One may come between any two lines.  So whoever takes the turn knows it before it is
        taken, and gives it back once more if the first time was interrupted.
        """
        turn: _Turn | None = None
        try:
            try:
                with self.news:
                    if not is_wanted():
                        return True
                    if self.turn is not None:
                        self.news.wait(_NAP_S)
                        return False
                    turn = _Turn(self.tasks[0])
                    self.turn = turn
                turn.outcome = _carried_out(turn.task)
                if turn.outcome.error and not self.failure:
                    self.at_failure()
            finally:
                self._end(turn)
        except KeyboardInterrupt:
            self._end(turn)
            raise
        return True

    def _end(self, turn: _Turn | None) -> None:
        """Give a turn back.  May be called again."""
        with self.news:
            if turn is None or self.turn is not turn:
                return
            task, outcome = turn.task, turn.outcome
            if outcome.error and not self.failure:
                self.failure, self.failed = outcome.error, (task.number, task.label)
            if outcome.is_over and not outcome.error:
                task.is_done = True
            if self.failure:
                self._drop_all()
                task.drop()
            elif task.is_done and self.tasks and self.tasks[0] is task:
                self.tasks.popleft()
            self.turn = None
            self.news.notify_all()

    def _drop_all(self) -> None:
        """With the lock held, after a failure: let go of what waits, and leave to its turn what is carried out."""
        while self.tasks:
            task = self.tasks.popleft()
            if self.turn is None or self.turn.task is not task:
                task.drop()

    def _check(self, task: Task | None) -> None:
        """With the lock held: raise if the group is unusable."""
        if not self.failure:
            return
        number, label = self.failed or (0, "")
        is_later = number > 0 and (task is None or task.number != number)
        since = f" The group is unusable since {repr(label) if label else 'an earlier collective'}."
        raise SharedMemoryFailed(self.failure + (since if is_later else ""))


@attrs.frozen
class _Outcome:
    is_over: bool  # done, or failed
    error: str = ""


@final
@attrs.define(eq=False)
class _Turn:
    """Somebody's, to carry out a task."""

    task: Task
    outcome: _Outcome = _Outcome(is_over=False)


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
