"""A thread pool for one list of jobs; its threads end with the list.

Copying, hashing and system calls on whole chunks release the interpreter's lock, so threads suffice.  One job, or one
thread, runs in the caller: small checkpoints never pay for a thread, and tests see one order of events.

A new thread has device 0 and default streams of CUDA, whatever its parent has.  Jobs copy to and from the caller's
tensors, so the threads get the caller's device and streams: only then are the copies in order with its work.

Rejected: concurrent.futures, which consumes the whole iterator of jobs at once, although it is lazy on purpose (the
runs of a badly sharded tensor are computed on demand), and continues with the other jobs after an error.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, final

import attrs
import torch

T = TypeVar("T")


def run_jobs(jobs: Iterable[Callable[[], T]], num_threads: int) -> list[T]:
    """Run every job; return the results in the order of the jobs.

    After an error no further job starts; when the running ones have ended, raises the error of the earliest job.
    """
    iterator = iter(jobs)
    ahead = list(itertools.islice(iterator, 2))
    if num_threads <= 1 or len(ahead) < 2:
        return [job() for job in itertools.chain(ahead, iterator)]
    pool: _ThreadPool[T] = _ThreadPool(enumerate(itertools.chain(ahead, iterator)), _streams())
    threads: list[threading.Thread] = []
    with contextlib.suppress(RuntimeError):  # no more threads available: continue with fewer
        for _ in range(num_threads - 1):
            thread = threading.Thread(target=pool.work, name="zckpt-pool", daemon=True)
            thread.start()
            threads.append(thread)
    pool.work()  # the caller is one of the threads
    try:
        for thread in threads:
            thread.join()
    except BaseException as interrupt:  # Ctrl-C: join before the caller frees the memory that the threads use
        pool.failures[-1] = interrupt
        for thread in threads:
            thread.join()
    if pool.failures:
        raise pool.failures[min(pool.failures)]
    return [pool.results[number] for number in sorted(pool.results)]


def _streams() -> list[torch.cuda.Stream]:
    """Return the current streams of this thread, that of the current device last.

    Other devices count with streams of their own only: to set the default one would initialize the device.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    here = torch.cuda.current_device()
    others = (number for number in range(torch.cuda.device_count()) if number != here)
    streams = [stream for number in others if (stream := torch.cuda.current_stream(number)).stream_id]
    return [*streams, torch.cuda.current_stream(here)]


@final
@attrs.define(eq=False)
class _ThreadPool(Generic[T]):
    """State shared by the threads of one call; `results` and `failures` are keyed by the job's number."""

    jobs: Iterator[tuple[int, Callable[[], T]]]
    streams: Sequence[torch.cuda.Stream]  # of the caller
    results: dict[int, T] = attrs.field(factory=dict)
    failures: dict[int, BaseException] = attrs.field(factory=dict)
    mutex: threading.Lock = attrs.field(factory=threading.Lock)

    def work(self) -> None:
        number = -1
        try:  # includes _next: an error of the job iterator must not look like its end
            with contextlib.ExitStack() as stack:
                for stream in self.streams:
                    stack.enter_context(torch.cuda.stream(stream))
                while (job := self._next()) is not None:
                    number, run = job
                    self.results[number] = run()
        except BaseException as error:
            self.failures[number] = error

    def _next(self) -> tuple[int, Callable[[], T]] | None:
        with self.mutex:
            return None if self.failures else next(self.jobs, None)
