"""Which transfers are under way, and which have failed without anybody knowing.

Transfers of one region stand in the region's line and run one after the other, each cut into chunks for all threads;
transfers of different regions run side by side.  Whoever ends a transfer sets the next of its line going, so no
thread ever waits for another.
"""

from __future__ import annotations

import functools
import threading
from typing import final

import attrs

from .errors import DiskClosed
from .transfer import Direction, Transfer
from .workers import Workers


@final
@attrs.define(eq=False)
class Traffic:
    """The transfers of a store."""

    workers: Workers
    under_way: set[Transfer] = attrs.field(factory=set)  # submitted and not over
    failed: list[Transfer] = attrs.field(factory=list)  # over, and perhaps nobody knows
    changed: threading.Condition = attrs.field(factory=threading.Condition)  # lock of the two above

    def submit(self, transfer: Transfer) -> None:
        """Start it, or let it wait for those before it in its region's line."""
        with self.changed:
            self.under_way.add(transfer)
        region = transfer.region
        with region.lock:
            region.line.append(transfer)
            is_first = len(region.line) == 1
        if is_first:  # by a thread, so that an interrupt (Ctrl-C) here cannot leave it half begun
            self.workers.put(functools.partial(self._go, transfer))

    def drain(self) -> None:
        """Wait until nothing is under way."""
        with self.changed:
            while self.under_way:
                self.changed.wait()

    def cancel(self, path: str) -> None:
        """Chunks that have not begun are skipped; whoever waits gets DiskClosed."""
        with self.changed:
            stopped = list(self.under_way)
        for transfer in stopped:
            what = f"the {transfer.direction.value} of region {transfer.region.name!r}"
            transfer.fail(
                DiskClosed(f"{path}: the store was closed before {what} was done; wait() for it first", path)
            )

    def forget_writes(self) -> None:
        """Nobody needs to hear of writes that failed."""
        with self.changed:
            self.failed = [each for each in self.failed if each.direction is Direction.READ]

    def take_untold(self) -> BaseException | None:
        """The first error that nobody has heard of; the others are forgotten with it."""
        with self.changed:
            untold = [each for each in self.failed if not each.told and not isinstance(each.error, DiskClosed)]
            self.failed = []
        for each in untold:
            each.told = True
        return untold[0].error if untold else None

    def _go(self, transfer: Transfer | None) -> None:
        """Put its chunks to the threads; if it has none, end it and go on with the next in line."""
        while transfer is not None:
            num_chunks = transfer.begin()
            for chunk in range(num_chunks):
                self.workers.put(functools.partial(self._move, transfer, chunk))
            if num_chunks:
                return
            transfer = self._end(transfer)

    def _move(self, transfer: Transfer, chunk: int) -> None:
        if transfer.move(chunk):
            self._go(self._end(transfer))

    def _end(self, transfer: Transfer) -> Transfer | None:
        """It is over; the next one of its line."""
        transfer.end()
        region = transfer.region
        with region.lock:
            region.line.popleft()
            following = region.line[0] if region.line else None
        with self.changed:
            self.under_way.discard(transfer)
            if transfer.error is not None:
                self.failed.append(transfer)
            self.changed.notify_all()
        transfer.over.set()
        return following
