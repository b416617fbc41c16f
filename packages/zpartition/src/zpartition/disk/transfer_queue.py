"""Transfers in flight, and failed ones that were not reported.

Transfers of one region wait in the region's queue and run one after the other, each in chunks for all threads;
transfers of different regions run side by side.  The thread that ends a transfer starts the next one of its queue, so
no thread waits for another.
"""

from __future__ import annotations

import functools
import threading
from typing import final

import attrs

from zpartition.disk.errors import DiskClosed
from zpartition.disk.region import Direction, Transfer
from zpartition.disk.thread_pool import ThreadPool


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
