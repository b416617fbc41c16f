"""One read or write of a whole region, and what is asked of it while it is under way.

A transfer is cut into chunks, each with a checksum that is computed by the thread that moves the chunk, while the
others move theirs.  It is `zlib.crc32`: it releases the GIL, does 4 GB/s a thread (zlib 1.2.13), and finds any burst
of 32 bits.  Measured beside it: sums and dot products of 64-bit words are three to eight times as fast, and miss
words that changed places, or pairs of flipped sign bits; the hashes of `hashlib` are half as fast or slower.  A write
is summed before it goes out, so a tensor that is changed meanwhile is told as damaged when it is read.
"""

from __future__ import annotations

import enum
import threading
import zlib
from typing import final

import attrs

from .errors import DiskCorrupt, DiskError, DiskFailed
from .files import explain
from .memory import Memory
from .region import Region


class Direction(enum.Enum):
    """Whereto."""

    READ = "read"  # into memory
    WRITE = "write"  # onto the disk


@final
@attrs.define(eq=False)
class Transfer:
    """A read or write under way; the tensor must not be used otherwise until `wait` has returned."""

    region: Region
    direction: Direction
    memory: Memory | None  # None when it is over, so that a transfer that is kept keeps no memory
    slot: int = 0  # known when it begins
    num_left: int = 0  # chunks
    error: BaseException | None = None  # the first one; chunks after it are skipped
    told: bool = False  # somebody has seen the error
    lock: threading.RLock = attrs.field(factory=threading.RLock)  # of num_left and error; taken by finalizers too
    over: threading.Event = attrs.field(factory=threading.Event)

    @property
    def is_done(self) -> bool:
        """Whether it is over, well or not."""
        return self.over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is over, or raise what went wrong: DiskCorrupt, DiskFailed, DiskFull or another DiskError.

        TimeoutError after `timeout` seconds; it goes on then, and can be waited for again.
        """
        if not self.over.wait(timeout):
            raise TimeoutError(f"the {self.direction.value} of region {self.region.name!r} takes over {timeout} s")
        if self.error is not None:
            self.told = True
            raise self.error

    def fail(self, error: BaseException) -> None:
        """The first error counts."""
        with self.lock:
            if self.error is None:
                self.error = error

    def begin(self) -> int:
        """Choose the slot; the number of chunks to move, 0 when that failed."""
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
        """Move one chunk, unless the transfer has failed; whether it was the last one."""
        if self.error is None:
            try:
                self._move(chunk)
            except OSError as error:
                self.fail(self._named(error, chunk))
            except DiskError as error:
                self.fail(error.with_traceback(None))  # whose frames would keep the tensor
            except BaseException as error:  # such as MemoryError: told to whoever waits, and the thread lives on
                self.fail(error)
        with self.lock:
            self.num_left -= 1
            return self.num_left == 0

    def end(self) -> None:
        """Note in the region what has become of it."""
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

    def _named(self, error: OSError, chunk: int) -> DiskFailed:
        start, stop = self._span(chunk)
        file = self.region.file
        return explain(
            file.system, error, f"{self.direction.value} region {self.region.name!r}", file.path, stop - start
        )
