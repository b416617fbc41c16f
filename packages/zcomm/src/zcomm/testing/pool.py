"""Rank pool: runs functions on real ranks, in hundredths of a second.

    from zcomm.testing import run_ranks

    def summed(value):
        tensor = torch.tensor([value + dist.get_rank()])
        zcomm.all_reduce(tensor)
        return tensor.item()

    def test_every_rank_sees_the_sum():
        assert run_ranks(summed, 2, 10.0) == [21.0, 21.0]

Starting a process that imports torch takes seconds; forking one that has it takes hundredths.  So the first use
starts a fork server with torch imported, and rank processes forked from it stay warm: one pool a test process,
grown on demand, ended with the test process.  Each call makes a new Gloo group over its own FileStore.  After any
abnormal end the pool is killed and restarted: a rank that failed in the middle of a collective is in an unknown
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
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, final

import attrs

from zcomm.testing.process import RANK_NAME, Rank
from zcomm.testing.rank import FINISHED
from zcomm.testing.reference import make_reference
from zcomm.testing.task import ResultCollector, RunRequest

__all__ = ["run_ranks"]

T = TypeVar("T")  # return type of the function


def run_ranks(fn: Callable[..., T], world_size: int, *args: Any, timeout_s: float = 600.0, **kwargs: Any) -> list[T]:
    """Run `fn(*args, **kwargs)` on `world_size` processes at once; return their results in rank order.

    Inside, torch.distributed has a default Gloo group of that size and the launch variables (RANK, WORLD_SIZE, ...)
    are set, so zcomm.init() adopts the group.  Environment, working directory and import path are the caller's;
    seeds, default dtype and threads (1) are reset for every call.

    fn: a function at the top level of any file.  args, kwargs, results: anything that pickles; tensors by value.
    Raises RankFailed with every rank's own traceback, signal or Python stack if one of them raises, dies or does not
    return within `timeout_s`, a limit against hangs; TypeError for a function or argument that cannot be sent.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks needs a world size of at least 1, got {world_size}.")
    function = make_reference(fn)
    try:
        arguments = pickle.dumps((args, kwargs))
    except Exception as error:
        raise TypeError(f"run_ranks cannot send the arguments of {function.qualname}: {error}") from error
    with _lock:
        pool = _warm_pool()
        try:
            return pool.run(RunRequest(function, world_size, arguments, timeout_s))
        except BaseException:
            pool.kill()
            raise


def end_ranks() -> None:
    """End the warm ranks: the next `run_ranks` starts fresh ones. For code that leaves state in its process."""
    with _lock:
        if _pool is not None:
            _pool.kill()


_lock = threading.Lock()  # one call at a time: two calls would use the same processes
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


@final
@attrs.define(eq=False)
class Pool:
    """Warm ranks of one test process.

    Invariant: between two calls of `run`, every process in `ranks` is idle, waiting for its next job.
    """

    owner_pid: int = attrs.field(factory=os.getpid)  # parent of the ranks
    ranks: list[Rank] = attrs.field(factory=list)
    folder: tempfile.TemporaryDirectory[str] = attrs.field(
        factory=lambda: tempfile.TemporaryDirectory(prefix="zcomm-ranks-", ignore_cleanup_errors=True)
    )  # holds the stack files and one store file per call
    numbers: Iterator[int] = attrs.field(factory=itertools.count)  # of calls and processes, never used twice

    def run(self, task: RunRequest) -> list[Any]:
        """Send the function, collect the results, release the ranks.

        Raises RankFailed, after which the pool must be killed.
        """
        if not all(rank.process.is_alive() for rank in self.ranks):
            self.kill()  # an idle rank was ended
        self._grow(task.world_size)
        ranks = self.ranks[: task.world_size]
        store_path = str(Path(self.folder.name, f"store-{next(self.numbers)}"))
        for number, rank in enumerate(ranks):
            rank.send(pickle.dumps(task.for_rank(number, store_path)))
        answers = ResultCollector(ranks, task).collect()
        for rank in ranks:
            rank.send(FINISHED)
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
        """Kill every rank process, by its own id.  The pool may be used again."""
        if self.owner_pid != os.getpid():
            return
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
