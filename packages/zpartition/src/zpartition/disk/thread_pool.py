"""Thread pool of a store.

Threads run jobs in submission order.  Rejected: `ThreadPoolExecutor`, which creates a future for every chunk, whose
threads delay the exit of the interpreter, and which does not signal the exit of its last thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import attrs

Job: TypeAlias = "Callable[[], None]"  # must not raise


@final
@attrs.define(eq=False)
class ThreadPool:
    """A fixed number of threads; the last one to exit runs the remaining jobs and calls `on_exit`."""

    threads: list[threading.Thread]
    jobs: queue.SimpleQueue[Job | None]

    @classmethod
    def start(cls, num_threads: int, on_exit: Job) -> ThreadPool:
        """Start daemon threads, so that an unclosed store does not delay the exit of the interpreter."""
        jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        present, lock = [num_threads], threading.Lock()

        def run() -> None:
            while (job := jobs.get()) is not None:
                job()
                del job  # or the tensor of the last job lives until the next one comes
            with lock:
                present[0] -= 1
                if present[0]:
                    return
            while not jobs.empty():  # put by a thread that was still at work when `stop` was called
                if (left := jobs.get()) is not None:
                    left()
            on_exit()

        threads = [
            threading.Thread(target=run, name=f"zpartition-disk-{number}", daemon=True)
            for number in range(num_threads)
        ]
        try:
            for thread in threads:
                thread.start()
        except BaseException:  # no more threads in this system: those that have begun go, without `on_exit`
            for _ in threads:
                jobs.put(None)
            raise
        return cls(threads, jobs)

    def put(self, job: Job) -> None:
        """Run `job` when a thread is free."""
        self.jobs.put(job)

    def run_all(self, calls: Sequence[Callable[[], None]]) -> list[BaseException | None]:
        """Run all `calls` and wait; returns the exception of each, or None.  Not for use by a pool thread."""
        results: list[BaseException | None] = [None] * len(calls)
        left = threading.Semaphore(0)

        def job(number: int) -> None:
            try:
                calls[number]()
            except BaseException as error:
                results[number] = error
            left.release()

        for number in range(len(calls)):
            self.put(lambda number=number: job(number))  # type: ignore[misc]
        for _ in calls:
            left.acquire()
        return results

    def stop(self) -> None:
        """Stop accepting jobs and join the threads, unless one of them calls it (garbage collection in a job)."""
        for _ in self.threads:
            self.jobs.put(None)
        if threading.current_thread() not in self.threads:
            for thread in self.threads:
                thread.join()
