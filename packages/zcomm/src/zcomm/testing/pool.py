"""Functions on real ranks, in hundredths of a second.

    from zcomm.testing import run_ranks

    def summed(value):
        tensor = torch.tensor([value + dist.get_rank()])
        zcomm.all_reduce(tensor)
        return tensor.item()

    def test_every_rank_sees_the_sum():
        assert run_ranks(summed, 2, 10.0) == [21.0, 21.0]

Starting a process that imports torch costs seconds; forking one that has it costs hundredths.  So the first use
starts a fork server with torch imported, and rank processes forked from it stay warm: one pool a test process,
grown on demand, ended with the test process.  A task is a new Gloo group over a FileStore of its own.  After any
abnormal end the pool is killed and made anew: a rank that failed in the middle of a collective is in no known
state.

Rejected: torch.multiprocessing.spawn (3 s a test); torch's threaded group (private, no send and receive, and
one global random generator for all ranks); a TCPStore, 8 ms faster than the file but every connection looks its
address up in the DNS, so that a slow name server costs 5 s in a test of 0.03 s.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, final

import attrs

from zcomm.testing.failure import Ending, RankFailed, RankReport
from zcomm.testing.process import RANK_NAME, START_LIMIT_S, Rank
from zcomm.testing.rank import FINISHED, GO, READY, Job
from zcomm.testing.reference import FunctionRef, refer

__all__ = ["run_ranks"]

_GRACE_S = 2.0  # for the other ranks to tell their end once one has failed
_OTHER_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_")  # their words must not reach a rank


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `world_size` processes at once; return their results in rank order.

    Inside, torch.distributed has a default Gloo group of that size and the launch variables (RANK, WORLD_SIZE,
    ...) are set, so zcomm.init() adopts the group.  Environment, working directory and import path are the
    caller's; seeds, default dtype and threads (1) are reset for every call.

    fn: a function at the top level of any file.  args, kwargs, results: anything that pickles; tensors by value.
    Raises RankFailed with every rank's own traceback, signal or Python stack if one of them raises, dies or is
    not back after `timeout_s`; TypeError for a function or argument that cannot be sent.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks wants a world size of at least 1, got {world_size}.")
    function = refer(fn)
    try:
        arguments = pickle.dumps((args, kwargs))
    except Exception as error:
        raise TypeError(f"run_ranks cannot send the arguments of {function.qualname}: {error}") from error
    with _lock:
        pool = _warm_pool()
        try:
            return pool.run(Task(function, world_size, arguments, timeout_s))
        except BaseException:
            pool.kill()
            raise


_lock = threading.Lock()  # one task at a time: the ranks of two tasks would be the same processes
_pool: Pool | None = None


def _warm_pool() -> Pool:
    global _pool
    if multiprocessing.current_process().name == RANK_NAME:
        raise RuntimeError(
            "run_ranks was called inside a rank process. Call it from the test itself; in a script, under "
            "`if __name__ == '__main__':`, because a rank loads the file of its function."
        )
    if _pool is None or _pool.owner_pid != os.getpid():  # a forked child must not talk to its parent's ranks
        _pool = Pool()
        atexit.register(_pool.kill)
    return _pool


@attrs.frozen
class Task:
    """What `run_ranks` was asked for."""

    function: FunctionRef
    world_size: int
    arguments: bytes  # pickle of (args, kwargs)
    timeout_s: float  # from the moment that all ranks are about to call the function

    def for_rank(self, rank: int, store_path: str) -> Job:
        launch = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",  # nobody listens: the default group exists before the function is called
        }
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_OTHER_LAUNCHERS)}
        loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
        return Job(
            rank=rank,
            world_size=self.world_size,
            store_path=store_path,
            timeout_s=self.timeout_s,
            function=self.function,
            arguments=self.arguments,
            environ=loopback | inherited | launch,
            cwd=os.getcwd(),
            path=list(sys.path),
        )


@final
@attrs.define(eq=False)
class Pool:
    """The warm ranks of one test process.

    Invariant: between two calls of `run`, every process in `ranks` is idle, waiting for its next job.
    """

    owner_pid: int = attrs.field(factory=os.getpid)  # the process whose children the ranks are
    ranks: list[Rank] = attrs.field(factory=list)
    folder: tempfile.TemporaryDirectory[str] = attrs.field(
        factory=lambda: tempfile.TemporaryDirectory(prefix="zcomm-ranks-", ignore_cleanup_errors=True)
    )  # holds the stack files and one store file a task
    numbers: Iterator[int] = attrs.field(factory=itertools.count)  # of tasks and processes, never used twice

    def run(self, task: Task) -> list[Any]:
        """Send, gather, release.  Raises RankFailed, after which the pool must be killed."""
        if not all(rank.process.is_alive() for rank in self.ranks):
            self.kill()  # somebody ended an idle rank
        self._grow(task.world_size)
        ranks = self.ranks[: task.world_size]
        store_path = str(Path(self.folder.name, f"store-{next(self.numbers)}"))
        for number, rank in enumerate(ranks):
            rank.tell(pickle.dumps(task.for_rank(number, store_path)))
        answers = Gathering(ranks, task).gather()
        for rank in ranks:
            rank.tell(FINISHED)
        return answers

    def _grow(self, world_size: int) -> None:
        fresh = [
            Rank.start(Path(self.folder.name, f"stack-{next(self.numbers)}"))
            for _ in range(world_size - len(self.ranks))
        ]
        self.ranks += fresh
        for rank in fresh:
            rank.await_ready()

    def kill(self) -> None:
        """End every rank process, by its own id.  The pool may be used again."""
        if self.owner_pid != os.getpid():
            return
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.bury()


@attrs.define(eq=False)
class Gathering:
    """Waiting for the answers of one task, without ever waiting for ever."""

    ranks: list[Rank]
    task: Task
    ready: int = 0  # ranks that are connected and wait for the others
    values: dict[int, Any] = attrs.field(factory=dict)  # of ranks that returned
    reports: dict[int, RankReport] = attrs.field(factory=dict)  # of ranks that did not
    deadline_s: float = attrs.field(factory=lambda: time.monotonic() + START_LIMIT_S)

    def gather(self) -> list[Any]:
        while pending := self._pending():
            ready = wait(list(pending), timeout=max(0.0, self.deadline_s - time.monotonic()))
            if not ready:
                raise self._failure(hung=list(pending.values()))
            for connection in ready:
                self._hear(pending[connection])
        if self.reports:
            raise self._failure(hung=[])
        return [self.values[number] for number in range(len(self.ranks))]

    def _pending(self) -> dict[Any, int]:
        """Connections of the ranks that owe an answer, and their numbers."""
        return {
            rank.connection: number
            for number, rank in enumerate(self.ranks)
            if number not in self.values and number not in self.reports
        }

    def _hear(self, number: int) -> None:
        """Take one message of one rank."""
        try:
            message = self.ranks[number].connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            self._failed(RankReport(number, Ending.DIED, self.ranks[number].epitaph()))
            return
        if message == READY:
            self.ready += 1
            if self.ready == len(self.ranks):
                self._go()
            return
        try:
            ending, value = pickle.loads(message)
        except Exception as error:
            text = f"its result cannot be unpickled in this process: {error!r}"
            self._failed(RankReport(number, Ending.RAISED, text, type(error).__name__))
            return
        if ending is Ending.RETURNED:
            self.values[number] = value
        else:
            self._failed(value)

    def _go(self) -> None:
        """Let all ranks call the function; their time runs from here."""
        self.deadline_s = time.monotonic() + self.task.timeout_s
        for rank in self.ranks:
            rank.tell(GO)

    def _failed(self, report: RankReport) -> None:
        self.reports[report.rank] = report
        self.deadline_s = min(self.deadline_s, time.monotonic() + _GRACE_S)

    def _failure(self, hung: list[int]) -> RankFailed:
        note = f": no answer within {self.task.timeout_s:g} s"
        if self.ready < len(self.ranks):
            note = f": not all ranks were connected within {START_LIMIT_S:g} s"
        if self.reports:
            note = ""  # they say enough
        for number in hung:
            self.reports[number] = RankReport(number, Ending.HUNG, self.ranks[number].stack())
        returned = [RankReport(number, Ending.RETURNED, "") for number in self.values]
        return RankFailed(self.task.function.qualname, len(self.ranks), [*self.reports.values(), *returned], note)
