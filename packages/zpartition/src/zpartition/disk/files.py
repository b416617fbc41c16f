"""One open file of a store: complete reads and writes at an offset, direct or buffered.

Short writes are resumed; in direct mode from the last whole block.  In direct mode unaligned memory goes through a
bounce buffer, and the end of a file is written in whole blocks (slots of a region are padded, so the room is there).
A file is never used in both modes: the page cache and the drive could disagree.

Rejected: one direct writer with zckpt, which writes a stream of unaligned bytes once (its local_files.py says more).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import final

import attrs

from zpartition.disk.errors import DiskFailed, DiskFull
from zpartition.disk.memory import ALIGNMENT, BounceBuffer, MemorySpan
from zpartition.disk.system import DIRECT, NEW, OLD, System

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
UNKNOWN_BYTES = -1


def to_disk_error(system: System, error: OSError, action: str, path: str, num_bytes: int = 0) -> DiskFailed:
    """Convert an OSError, raised during `action` on the file at `path`, into a named error."""
    if error.errno not in NO_ROOM:
        return DiskFailed(action, path, error.errno or errno.EIO, num_bytes)
    try:
        free_bytes = system.free_bytes(os.path.dirname(path))
    except OSError:
        free_bytes = UNKNOWN_BYTES
    return DiskFull(action, path, error.errno, num_bytes, free_bytes)


@contextlib.contextmanager
def translate_os_errors(system: System, action: str, path: str, num_bytes: int = 0) -> Iterator[None]:
    """Convert OSErrors raised inside into named errors."""
    try:
        yield
    except OSError as error:
        raise to_disk_error(system, error, action, path, num_bytes) from error


@final
@attrs.define(eq=False)
class BlockFile:
    """An open file, read and written at offsets that are multiples of the alignment."""

    system: System
    path: str
    fd: int
    is_direct: bool
    bounce: BounceBuffer

    @classmethod
    def create(cls, system: System, path: str, num_bytes: int, *, is_direct: bool, bounce: BounceBuffer) -> BlockFile:
        """Create a file with its space reserved.  Raises OSError, and removes the file if that fails."""
        try:
            fd = system.open(path, NEW)
            try:  # not in direct mode: where the file system cannot reserve, the C library writes single bytes
                if num_bytes > system.free_bytes(os.path.dirname(path)):  # or the call would fill the disk first
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if num_bytes:
                    system.allocate(fd, num_bytes)
            finally:
                system.close(fd)
            return cls.open(system, path, is_direct=is_direct, bounce=bounce)
        except FileExistsError:
            raise
        except BaseException:
            system.remove(path)
            raise

    @classmethod
    def open(cls, system: System, path: str, *, is_direct: bool, bounce: BounceBuffer) -> BlockFile:
        """Open an existing file."""
        return cls(system, path, system.open(path, OLD | (DIRECT if is_direct else 0)), is_direct, bounce)

    def close(self) -> None:
        """Close the file; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.system.close(fd)

    def write(self, memory: MemorySpan, offset: int) -> None:
        """Write all of `memory`.  Raises OSError."""
        if self.is_direct and not memory.is_aligned:
            bounce = self.bounce.get(len(memory.bytes))
            bounce.bytes[: len(memory.bytes)] = memory.bytes
            memory = bounce
        done, size = 0, len(memory.bytes)
        while done < size:
            count = self._whole(self.system.write(self.fd, memory.bytes[done:], offset + done), size - done)
            if count == 0:
                raise OSError(errno.EIO, "the system wrote nothing")
            done += count

    def read(self, memory: MemorySpan, offset: int) -> int:
        """Read into `memory`; returns the number of bytes read, fewer than requested only at the end."""
        size = len(memory.bytes)
        if not self.is_direct or memory.is_aligned:
            return self._read(memory, offset)
        bounce = self.bounce.get(size)
        came = min(self._read(bounce, offset), size)
        memory.bytes[:came] = bounce.bytes[:came]
        return came

    def sync(self) -> None:
        """Flush written data to the medium.  Raises DiskFailed."""
        with translate_os_errors(self.system, "sync", self.path):
            self.system.sync_data(self.fd)

    def _read(self, memory: MemorySpan, offset: int) -> int:
        done, size = 0, len(memory.bytes)
        while done < size:
            count = self._whole(self.system.read(self.fd, memory.bytes[done:], offset + done), size - done)
            if count == 0:
                break
            done += count
        return done

    def _whole(self, count: int, wanted: int) -> int:
        """Round a short count down to whole blocks in direct mode, which can resume there only."""
        return count - count % ALIGNMENT if self.is_direct and count < wanted else count


def allows_direct(system: System, path: str) -> bool:
    """Check if the file system supports O_DIRECT, by writing a probe file at `path`, which is removed."""
    if not DIRECT:
        return False
    system.remove(path)
    try:
        probe = BlockFile.create(system, path, ALIGNMENT, is_direct=True, bounce=BounceBuffer())
        try:
            probe.write(probe.bounce.get(ALIGNMENT), 0)
        finally:
            probe.close()
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            return False
        raise
    finally:
        system.remove(path)
    return True
