"""Transfer queue of a store: transfers in flight, failed ones that were not reported, and the threads that run them.

Transfers of one region wait in the region's queue and run one after the other, each in chunks for all threads;
transfers of different regions run side by side.  The thread that ends a transfer starts the next one of its queue, so
no thread waits for another.  The threads run jobs in submission order.

Rejected: `ThreadPoolExecutor`, which creates a future for every chunk, whose threads delay the exit of the
interpreter, and which does not signal the exit of its last thread.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import attrs

from zpartition.disk.errors import DiskClosed
from zpartition.disk.region import Direction, Transfer

Job: TypeAlias = "Callable[[], None]"  # must not raise


@final
@attrs.define(eq=False)
class TransferQueue:
    """The transfers of a store."""

    pool: ThreadPool
    in_flight: set[Transfer] = attrs.field(factory=set)  # submitted and not over
    failed: list[Transfer] = attrs.field(factory=list)  # over, perhaps not reported
    changed: threading.Condition = attrs.field(factory=threading.Condition)  # lock of the two above

    def submit(self, transfer: Transfer) -> None:
        """Start a transfer, or queue it behind earlier ones of its region."""
        with self.changed:
            self.in_flight.add(transfer)
        region = transfer.region
        with region.lock:
            region.queue.append(transfer)
            is_first = len(region.queue) == 1
        if is_first:  # by a thread, so that an interrupt (Ctrl-C) here cannot leave it half begun
            self.pool.put(functools.partial(self._go, transfer))

    def drain(self) -> None:
        """Wait until no transfer is in flight."""
        with self.changed:
            while self.in_flight:
                self.changed.wait()

    def cancel(self, path: str) -> None:
        """Skip chunks that have not started; `wait` raises DiskClosed."""
        with self.changed:
            stopped = list(self.in_flight)
        for transfer in stopped:
            what = f"the {transfer.direction.value} of region {transfer.region.name!r}"
            transfer.fail(
                DiskClosed(f"{path}: the store was closed before {what} was done; wait() for it first", path)
            )

    def drop_write_errors(self) -> None:
        """Drop unreported errors of writes."""
        with self.changed:
            self.failed = [each for each in self.failed if each.direction is Direction.READ]

    def pop_unreported(self) -> BaseException | None:
        """Return the first unreported error, and drop the others."""
        with self.changed:
            found = [each for each in self.failed if not each.is_reported and not isinstance(each.error, DiskClosed)]
            self.failed = []
        for each in found:
            each.is_reported = True
        return found[0].error if found else None

    def _go(self, transfer: Transfer | None) -> None:
        """Hand the chunks to the threads; a transfer without chunks ends here, and the next one starts."""
        while transfer is not None:
            num_chunks = transfer.begin()
            for chunk in range(num_chunks):
                self.pool.put(functools.partial(self._move, transfer, chunk))
            if num_chunks:
                return
            transfer = self._end(transfer)

    def _move(self, transfer: Transfer, chunk: int) -> None:
        if transfer.move(chunk):
            self._go(self._end(transfer))

    def _end(self, transfer: Transfer) -> Transfer | None:
        """End a transfer; returns the next one of its queue."""
        transfer.end()
        region = transfer.region
        with region.lock:
            region.queue.popleft()
            following = region.queue[0] if region.queue else None
        with self.changed:
            self.in_flight.discard(transfer)
            if transfer.error is not None:
                self.failed.append(transfer)
            self.changed.notify_all()
        transfer.over.set()
        return following


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
