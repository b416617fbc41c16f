"""The threads of a store.

They run calls in the order in which they were put.  Python's `ThreadPoolExecutor` was rejected: it makes a future for
every chunk, its threads hold up the end of the interpreter, and nothing tells when the last of them has gone.
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
class Workers:
    """A fixed number of threads; the last one to leave does what jobs are left and calls `at_end`."""

    threads: list[threading.Thread]
    jobs: queue.SimpleQueue[Job | None]

    @classmethod
    def start(cls, num_threads: int, at_end: Job) -> Workers:
        """Daemons: a store that nobody closed does not hold up the end of the interpreter."""
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
            at_end()

        threads = [
            threading.Thread(target=run, name=f"zpartition-disk-{number}", daemon=True)
            for number in range(num_threads)
        ]
        try:
            for thread in threads:
                thread.start()
        except BaseException:  # no more threads in this system: those that have begun go, without `at_end`
            for _ in threads:
                jobs.put(None)
            raise
        return cls(threads, jobs)

    def put(self, job: Job) -> None:
        """Run it when a thread is free."""
        self.jobs.put(job)

    def run_all(self, calls: Sequence[Callable[[], None]]) -> list[BaseException | None]:
        """Run all of them, wait, and tell what each of them raised; not from one of the threads."""
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
        """No more jobs; wait for the threads, unless called by one of them (a garbage collection inside a job)."""
        for _ in self.threads:
            self.jobs.put(None)
        if threading.current_thread() not in self.threads:
            for thread in self.threads:
                thread.join()
