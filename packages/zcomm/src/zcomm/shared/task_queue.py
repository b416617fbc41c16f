"""Task queue: runs collectives of several steps one after the other, in the order of issue.

A two-level collective is a generator: it issues a step, yields it, and continues when the step is done.  All ranks
must issue the steps of a collective, and the collectives, in one order.  So each group has one queue that runs only
its first task, whichever handle is waited for.  As in csrc/zs_engine.c, a task is run by the thread that waits for
it, or by the queue's thread while the caller computes.  An interrupted wait leaves the task for the next thread.
Tasks with steps that cannot be interrupted are run by the queue's thread only.
A forked child must not continue it: the connections are its parent's, and so may be the lock.

Rejected: running the second level in the wait for its own handle (ranks may wait in different orders); one thread for
everything (every synchronous call would pay for two hand-overs).
"""

from __future__ import annotations

import enum
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, final

import attrs

from zcomm.hangs.observer import ABORTED, observer
from zcomm.shared.failure import SharedMemoryFailed, forked_message

__all__ = ["Runner", "Step", "Task", "TaskQueue"]

_PAUSE_S = 0.1  # pause of a caller whose task another thread runs


class Step(Protocol):
    """An issued step."""

    def wait(self) -> None:
        """Wait for the step.  Raises SharedMemoryFailed.  May be interrupted, and called again."""


class Runner(enum.Enum):
    """Who runs a task."""

    WAITER = "waiter"  # a thread that waits for it, or the queue's
    THREAD = "thread"  # only the queue's thread: its steps cannot be interrupted


@final
@attrs.define(eq=False)
class Task:
    """A collective in the queue.

    Invariant: once done, `steps` is exhausted and holds no tensor.
    """

    queue: TaskQueue
    steps: Iterator[Step]
    label: str
    number: int  # in the order of issue, from 1
    runner: Runner = attrs.field(kw_only=True)
    pending: Step | None = None  # issued and not yet waited for
    is_done: bool = False

    def wait(self) -> None:
        self.queue.wait(self)

    def is_completed(self) -> bool:
        """True if `wait` would return, or raise, at once."""
        return self.is_done or self.queue.is_stopped()

    def drop(self) -> None:
        """Release the tensors of a task that will not run any further."""
        self.steps, self.pending = iter(()), None

    def help_for(self, seconds: float) -> bool:
        """Wait for that long at most while the thread works.  True if the task is over, successful or not."""
        return self.queue.await_thread(self, seconds)


@final
@attrs.define(eq=False)
class TaskQueue:
    """The queue of one group.

    Invariant: `failure`, once set, stays; then no task starts, and those that end are dropped with all that wait.
    """

    on_failure: Callable[[], None]  # informs the other ranks
    tasks: deque[Task] = attrs.field(factory=deque)
    num_issued: int = 0
    num_wanted: int = 0  # the thread runs tasks up to this number
    turn: _Turn | None = None  # of the thread that runs the first task
    failure: str = ""  # why the group is unusable
    failed: tuple[int, str] | None = None  # number and label of the task that failed
    pid: int = attrs.field(factory=os.getpid)  # of the process that may use the queue: a forked child may not
    thread: threading.Thread | None = None  # started on first use
    changed: threading.Condition = attrs.field(factory=threading.Condition)  # guards all above

    def issue(
        self, steps: Iterator[Step], *, label: str = "", overlap: bool = False, runner: Runner = Runner.WAITER
    ) -> Task:
        """Append a collective.  Raises SharedMemoryFailed if the group is unusable."""
        with self.changed:
            self._check(None)
            self.num_issued += 1
            task = Task(self, steps, label, self.num_issued, runner=runner)
            self.tasks.append(task)
            if overlap:
                self._hand_to_thread(task)
        return task

    def wait(self, task: Task) -> None:
        """Run the tasks up to this one, or wait for the thread that does.  Raises SharedMemoryFailed."""
        while not task.is_done:
            if os.getpid() != self.pid:
                raise SharedMemoryFailed(forked_message(self.pid))
            if not self._take_turn(lambda: self._is_wanted(task)) and observer().is_aborted():
                raise SharedMemoryFailed(ABORTED)

    def await_thread(self, task: Task, seconds: float) -> bool:
        """Let the thread run the tasks up to this one, for that long at most.  True if the task is over."""
        if task.is_completed():
            return True
        with self.changed:
            self._hand_to_thread(task)
            return self.changed.wait_for(task.is_completed, max(0.0, seconds))

    def is_stopped(self) -> bool:
        """True if no task runs any more, or not in this process."""
        return bool(self.failure) or os.getpid() != self.pid

    def close(self, reason: str) -> bool:
        """Start no further task.  True if one was in flight; the caller must end its step."""
        with self.changed:
            was_busy = bool(self.tasks) and not self.failure
            self.failure = self.failure or reason
            self.changed.notify_all()
        return was_busy

    def join(self) -> None:
        """Join the thread, after `close`."""
        thread, self.thread = self.thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self.changed:
            self._drop_all()

    def _hand_to_thread(self, task: Task) -> None:
        """Let the thread run the tasks up to this one.  Requires the lock."""
        if self.failure:
            return
        self.num_wanted = max(self.num_wanted, task.number)
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, daemon=True, name="zcomm-queue")
            self.thread.start()
        self.changed.notify_all()

    def _is_left_to_thread(self, task: Task) -> bool:
        """Return whether the calling thread may not run a task; then the queue's will.  Requires the lock."""
        if task.runner is Runner.WAITER or self.failure:
            return False
        self._hand_to_thread(task)
        return threading.current_thread() is not self.thread

    def _serve(self) -> None:
        """Run the thread."""
        while not self.failure:
            self._take_turn(self._await_wanted)

    def _await_wanted(self) -> bool:
        """Wait until the first task is the thread's to run; False once there will be none.  Requires the lock."""
        while not self.failure and (
            self.turn is not None or not self.tasks or self.tasks[0].number > self.num_wanted
        ):
            self.changed.wait()
        return not self.failure

    def _is_wanted(self, task: Task) -> bool:
        """True if a task has still to be run.  Requires the lock.  Raises SharedMemoryFailed."""
        if not task.is_done:
            self._check(task)
        return not task.is_done

    def _take_turn(self, is_wanted: Callable[[], bool]) -> bool:
        """Run the first task if `is_wanted`; return False, after a short pause, if another thread is to run it.

        [Note: interruptions] An interrupt may come between any two lines.  So a turn is known to its thread before it
        is taken, and is ended once more if the first end was interrupted.
        """
        turn: _Turn | None = None
        try:
            try:
                with self.changed:
                    if not is_wanted():
                        return True
                    if self.turn is not None or self._is_left_to_thread(self.tasks[0]):
                        self.changed.wait(_PAUSE_S)
                        return False
                    turn = _Turn(self.tasks[0])
                    self.turn = turn
                turn.outcome = _run_to_end(turn.task)
                if turn.outcome.error and not self.failure:
                    self.on_failure()
            finally:
                self._end(turn)
        except KeyboardInterrupt:
            self._end(turn)
            raise
        return True

    def _end(self, turn: _Turn | None) -> None:
        """End a turn.  May be called again."""
        with self.changed:
            if turn is None or self.turn is not turn:
                return
            task, outcome = turn.task, turn.outcome
            if outcome.error and not self.failure:
                self.failure, self.failed = outcome.error, (task.number, task.label)
            if outcome.is_stopped and not outcome.error:
                task.is_done = True
            if self.failure:
                self._drop_all()
                task.drop()
            elif task.is_done and self.tasks and self.tasks[0] is task:
                self.tasks.popleft()
            self.turn = None
            self.changed.notify_all()

    def _drop_all(self) -> None:
        """Drop all waiting tasks after a failure; the running one is left to its turn.  Requires the lock."""
        while self.tasks:
            task = self.tasks.popleft()
            if self.turn is None or self.turn.task is not task:
                task.drop()

    def _check(self, task: Task | None) -> None:
        """Raise if the group is unusable.  Requires the lock."""
        if not self.failure:
            return
        number, label = self.failed or (0, "")
        is_later = number > 0 and (task is None or task.number != number)
        since = f" The group is unusable since {repr(label) if label else 'an earlier collective'}."
        raise SharedMemoryFailed(self.failure + (since if is_later else ""))


@attrs.frozen
class _Outcome:
    is_stopped: bool  # done, or failed
    error: str = ""


@final
@attrs.define(eq=False)
class _Turn:
    """The right of one thread to run a task."""

    task: Task
    outcome: _Outcome = _Outcome(is_stopped=False)


def _run_to_end(task: Task) -> _Outcome:
    """Run a task to its end or to its error.  An interrupt passes through and leaves the task resumable."""
    try:
        while True:
            if task.pending is not None:
                task.pending.wait()
                task.pending = None
            task.pending = next(task.steps)
    except StopIteration:
        return _Outcome(is_stopped=True)
    except Exception as error:
        return _Outcome(is_stopped=True, error=str(error) or repr(error))
    except BaseException:
        if task.pending is None:
            task.steps = _interrupted_steps()
        raise


def _interrupted_steps() -> Iterator[Step]:
    """Steps of a collective that was interrupted while it issued a step: the step may or may not be issued."""
    yield from ()
    raise SharedMemoryFailed("it was interrupted on this rank between two of its steps.")
