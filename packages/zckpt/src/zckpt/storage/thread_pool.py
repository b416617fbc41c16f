"""A few threads that work through a list together, and none of them afterwards.

Copying, hashing and system calls on whole chunks release the interpreter's lock, so threads are enough.  One job, or
one thread, runs where the caller is: small checkpoints never pay for a thread, and a test sees one order of events.

Rejected: concurrent.futures, which takes all jobs at once from an iterator that is lazy on purpose (the runs of a
badly cut tensor are made as they are needed) and goes on with the rest after an error.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar, final

import attrs

T = TypeVar("T")


def run_jobs(jobs: Iterable[Callable[[], T]], num_threads: int) -> list[T]:
    """Run every job; their results in the order of the jobs.

    After an error no further job begins; when those under way have ended, the error of the earliest job is raised.
    """
    iterator = iter(jobs)
    ahead = list(itertools.islice(iterator, 2))
    if num_threads <= 1 or len(ahead) < 2:
        return [job() for job in itertools.chain(ahead, iterator)]
    pool: _ThreadPool[T] = _ThreadPool(enumerate(itertools.chain(ahead, iterator)))
    threads: list[threading.Thread] = []
    with contextlib.suppress(RuntimeError):  # the system has no more of them: fewer hands then
        for _ in range(num_threads - 1):
            thread = threading.Thread(target=pool.work, name="zckpt-crew", daemon=True)
            thread.start()
            threads.append(thread)
    pool.work()  # the caller is one of them
    try:
        for thread in threads:
            thread.join()
    except BaseException as interrupt:  # Ctrl-C: what they work on must not go before they do
        pool.failures[-1] = interrupt
        for thread in threads:
            thread.join()
    if pool.failures:
        raise pool.failures[min(pool.failures)]
    return [pool.results[number] for number in sorted(pool.results)]


@final
@attrs.define(eq=False)
class _ThreadPool(Generic[T]):
    """State shared by the threads of one call; `results` and `failures` are keyed by the job's number."""

    jobs: Iterator[tuple[int, Callable[[], T]]]
    results: dict[int, T] = attrs.field(factory=dict)
    failures: dict[int, BaseException] = attrs.field(factory=dict)
    mutex: threading.Lock = attrs.field(factory=threading.Lock)

    def work(self) -> None:
        number = -1
        try:  # around all of it: a job that could not be made must not look like the end of the list
            while (job := self._next()) is not None:
                number, run = job
                self.results[number] = run()
        except BaseException as error:
            self.failures[number] = error

    def _next(self) -> tuple[int, Callable[[], T]] | None:
        with self.mutex:
            return None if self.failures else next(self.jobs, None)
