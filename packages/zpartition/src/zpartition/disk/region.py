"""Regions: named byte ranges with two slots, and the transfers that read and write them.

One slot is current: it holds the last commit.  Writes go to the other slot, so the committed bytes stay readable
whatever happens to a write.  A commit makes the other slot current, and the roles swap.

    NONE     nothing was written since the last commit; reads see the current slot
    TORN     a write of the other slot is not finished or has failed: there is nothing to commit
    WRITTEN  the other slot is complete; reads see it

A transfer reads or writes a whole region in chunks.  The thread that moves a chunk also computes its checksum, while
other threads move theirs.  The checksum is `zlib.crc32`: it releases the GIL, runs at 4 GB/s per thread (zlib
1.2.13), and detects any burst error of 32 bits.  Rejected: sums and dot products of 64-bit words, three to eight
times as fast, which miss words that changed places and pairs of flipped sign bits; the hashes of `hashlib`, half as
fast or slower.  A write is checksummed before it is sent, so a tensor that changes meanwhile is reported as corrupt
when it is read.
"""

from __future__ import annotations

import enum
import os
import threading
import zlib
from collections import deque
from threading import Lock
from typing import final

import attrs

from zpartition.disk.errors import DiskCorrupt, DiskError, DiskFailed
from zpartition.disk.files import BlockFile, to_disk_error
from zpartition.disk.journal import NO_SLOT, RegionEntry, num_chunks
from zpartition.disk.memory import MemorySpan, padded


class Pending(enum.Enum):
    """State of the slot that is not current."""

    NONE = "none"
    TORN = "torn"
    WRITTEN = "written"


@final
@attrs.define(eq=False)
class Region:
    """A named range of bytes; `name` and `num_bytes` are public, the rest belongs to the store.

    Invariant: transfers of one region run one after the other, in submission order.  So a read sees the write before
    it, and `pending` changes only at the end of a transfer or while none is in flight.
    """

    name: str
    num_bytes: int
    file: BlockFile  # slot 0 at 0, slot 1 at slot_bytes
    chunk_bytes: int
    current: int = NO_SLOT  # the committed slot
    pending: Pending = Pending.NONE
    checksums: list[list[int]] = attrs.field(factory=lambda: [[], []])  # of each slot: crc32 of each chunk
    failure: BaseException | None = None  # why it is TORN
    queue: deque[Transfer] = attrs.field(factory=deque)  # the first one is in flight
    lock: Lock = attrs.field(factory=Lock)  # of `queue`

    @property
    def slot_bytes(self) -> int:
        """Size of one slot, padded."""
        return padded(self.num_bytes)

    @property
    def other(self) -> int:
        """The slot that writes go to."""
        return 0 if self.current == NO_SLOT else 1 - self.current

    def begin_read(self) -> int:
        """Return the slot to read.  Raises DiskError if no slot is valid."""
        if self.pending is Pending.TORN:
            raise DiskError(
                f"{self.file.path}: the last write of region {self.name!r} failed ({self.failure}); write it "
                "again, or discard() to return to the last commit",
                self.file.path,
            )
        slot = self.other if self.pending is Pending.WRITTEN else self.current
        if slot == NO_SLOT:
            raise DiskError(
                f"{self.file.path}: region {self.name!r} is empty: it was never written, or its writes were "
                "discarded; write it first",
                self.file.path,
            )
        return slot

    def begin_write(self) -> int:
        """Return the slot to write."""
        self.pending, self.failure = Pending.TORN, None
        self.checksums[self.other] = [0] * num_chunks(self.num_bytes, self.chunk_bytes)
        return self.other

    def end_write(self, failure: BaseException | None) -> None:
        """Record the end of a write; `failure` is the first error, if any."""
        self.failure = failure
        if failure is None:
            self.pending = Pending.WRITTEN

    def mark_torn(self, failure: BaseException) -> None:
        """Mark the pending write as failed: its bytes may not have reached the medium."""
        self.pending, self.failure = Pending.TORN, failure

    def reset(self) -> None:
        """Forget writes since the last commit."""
        self.pending, self.failure = Pending.NONE, None

    def entry(self) -> RegionEntry:
        """Return the journal entry, with the pending write as the current slot."""
        slot = self.other if self.pending is Pending.WRITTEN else self.current
        sums = () if slot == NO_SLOT else tuple(self.checksums[slot])
        return RegionEntry(self.name, os.path.basename(self.file.path), self.num_bytes, slot, sums)

    def adopt(self, entry: RegionEntry) -> None:
        """Apply a journal entry; idempotent."""
        self.current = entry.slot
        if entry.slot != NO_SLOT:
            self.checksums[entry.slot] = list(entry.checksums)
        self.reset()


class Direction(enum.Enum):
    """Direction of a transfer."""

    READ = "read"  # into memory
    WRITE = "write"  # onto the disk


@final
@attrs.define(eq=False)
class Transfer:
    """A read or write in flight; the tensor must not be used until `wait` has returned."""

    region: Region
    direction: Direction
    memory: MemorySpan | None  # None when it is over, so that a transfer that is kept keeps no memory
    slot: int = 0  # known when it begins
    num_left: int = 0  # chunks
    error: BaseException | None = None  # the first one; chunks after it are skipped
    is_reported: bool = False  # the error was raised somewhere
    lock: threading.RLock = attrs.field(factory=threading.RLock)  # of num_left and error; taken by finalizers too
    over: threading.Event = attrs.field(factory=threading.Event)

    @property
    def is_done(self) -> bool:
        """True if the transfer is over, successfully or not."""
        return self.over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end.  Raises the transfer's error: DiskCorrupt, DiskFailed, DiskFull or another DiskError.

        Raises TimeoutError after `timeout` seconds; the transfer continues, and `wait` may be called again.
        """
        if not self.over.wait(timeout):
            raise TimeoutError(f"the {self.direction.value} of region {self.region.name!r} takes over {timeout} s")
        if self.error is not None:
            self.is_reported = True
            raise self.error

    def fail(self, error: BaseException) -> None:
        """Record an error; only the first one counts."""
        with self.lock:
            if self.error is None:
                self.error = error

    def begin(self) -> int:
        """Choose the slot; returns the number of chunks to move, 0 if that failed."""
        region = self.region
        if self.error is None:
            try:
                self.slot = region.begin_read() if self.direction is Direction.READ else region.begin_write()
            except DiskError as error:
                self.fail(error)
        size = region.chunk_bytes
        self.num_left = 0 if self.error else -(-region.num_bytes // size)
        return self.num_left

    def move(self, chunk: int) -> bool:
        """Move one chunk, unless the transfer has failed; returns True for the last chunk."""
        if self.error is None:
            try:
                self._move(chunk)
            except OSError as error:
                self.fail(self._to_disk_error(error, chunk))
            except DiskError as error:
                self.fail(error.with_traceback(None))  # whose frames would keep the tensor
            except BaseException as error:  # such as MemoryError: `wait` raises it, and the thread lives on
                self.fail(error)
        with self.lock:
            self.num_left -= 1
            return self.num_left == 0

    def end(self) -> None:
        """Record the outcome in the region."""
        if self.direction is Direction.WRITE:
            self.region.end_write(self.error)
        self.memory = None

    def _span(self, chunk: int) -> tuple[int, int]:
        start = chunk * self.region.chunk_bytes
        return start, min(start + self.region.chunk_bytes, self.region.num_bytes)

    def _move(self, chunk: int) -> None:
        assert self.memory is not None
        start, stop = self._span(chunk)
        part, offset = self.memory.cut(start, stop), self.slot * self.region.slot_bytes + start
        if self.direction is Direction.WRITE:
            self.region.checksums[self.slot][chunk] = zlib.crc32(part.bytes)
            self.region.file.write(part, offset)
            return
        came = self.region.file.read(part, offset)
        expected = self.region.checksums[self.slot][chunk]
        found = zlib.crc32(part.bytes)
        if came < stop - start or found != expected:
            what = f"checksum {found:08x}" if came == stop - start else f"the end of the file after {came:,} bytes"
            raise DiskCorrupt(self.region.file.path, self.region.name, start, f"checksum {expected:08x}", what)

    def _to_disk_error(self, error: OSError, chunk: int) -> DiskFailed:
        start, stop = self._span(chunk)
        file = self.region.file
        return to_disk_error(
            file.system, error, f"{self.direction.value} region {self.region.name!r}", file.path, stop - start
        )
