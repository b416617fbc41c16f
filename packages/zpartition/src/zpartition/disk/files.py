"""One open file of the store: whole reads and writes at an offset, direct or buffered.

A write that the system cut short is resumed, in direct mode from the last whole block.  In direct mode memory that
does not fit goes through a bounce buffer, and the end of a file is written in whole blocks (the room is there: the
slots of a region are padded).  The two modes are never mixed on one file, since the page cache and the drive would
then hold two truths.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import final

import attrs

from .errors import DiskFailed, DiskFull
from .memory import Bounce, Memory
from .options import ALIGNMENT
from .system import DIRECT, NEW, OLD, System

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
UNKNOWN_BYTES = -1


def explain(system: System, error: OSError, doing: str, path: str, num_bytes: int = 0) -> DiskFailed:
    """The named error for one of the system's, raised while `doing` something with the file at `path`."""
    if error.errno not in NO_ROOM:
        return DiskFailed(doing, path, error.errno or errno.EIO, num_bytes)
    try:
        free_bytes = system.free_bytes(os.path.dirname(path))
    except OSError:
        free_bytes = UNKNOWN_BYTES
    return DiskFull(doing, path, error.errno, num_bytes, free_bytes)


@contextlib.contextmanager
def naming(system: System, doing: str, path: str, num_bytes: int = 0) -> Iterator[None]:
    """OSErrors inside become named errors."""
    try:
        yield
    except OSError as error:
        raise explain(system, error, doing, path, num_bytes) from error


@final
@attrs.define(eq=False)
class BlockFile:
    """An open file that is read and written at offsets which are multiples of the alignment."""

    system: System
    path: str
    fd: int
    is_direct: bool
    bounce: Bounce

    @classmethod
    def create(cls, system: System, path: str, num_bytes: int, *, is_direct: bool, bounce: Bounce) -> BlockFile:
        """A new file with its room reserved; nothing is left of one that failed (OSError)."""
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
    def open(cls, system: System, path: str, *, is_direct: bool, bounce: Bounce) -> BlockFile:
        """A file that is there."""
        return cls(system, path, system.open(path, OLD | (DIRECT if is_direct else 0)), is_direct, bounce)

    def close(self) -> None:
        """Twice is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.system.close(fd)

    def write(self, memory: Memory, offset: int) -> None:
        """All of it, or OSError."""
        if self.is_direct and not memory.is_aligned:
            bounce = self.bounce.take(len(memory.bytes))
            bounce.bytes[: len(memory.bytes)] = memory.bytes
            memory = bounce
        done, size = 0, len(memory.bytes)
        while done < size:
            count = self._whole(self.system.write(self.fd, memory.bytes[done:], offset + done), size - done)
            if count == 0:
                raise OSError(errno.EIO, "the system wrote nothing")
            done += count

    def read(self, memory: Memory, offset: int) -> int:
        """How many bytes came: fewer than asked for only where the file ends."""
        size = len(memory.bytes)
        if not self.is_direct or memory.is_aligned:
            return self._read(memory, offset)
        bounce = self.bounce.take(size)
        came = min(self._read(bounce, offset), size)
        memory.bytes[:came] = bounce.bytes[:came]
        return came

    def sync(self) -> None:
        """What was written is on the medium; DiskFailed if it may not be."""
        with naming(self.system, "sync", self.path):
            self.system.sync_data(self.fd)

    def _read(self, memory: Memory, offset: int) -> int:
        done, size = 0, len(memory.bytes)
        while done < size:
            count = self._whole(self.system.read(self.fd, memory.bytes[done:], offset + done), size - done)
            if count == 0:
                break
            done += count
        return done

    def _whole(self, count: int, wanted: int) -> int:
        """Of a short call, the part after which direct mode can go on."""
        return count - count % ALIGNMENT if self.is_direct and count < wanted else count


def allows_direct(system: System, path: str) -> bool:
    """Whether the file system takes O_DIRECT, tried out on a file at `path`, which is removed."""
    if not DIRECT:
        return False
    system.remove(path)
    try:
        probe = BlockFile.create(system, path, ALIGNMENT, is_direct=True, bounce=Bounce())
        try:
            probe.write(probe.bounce.take(ALIGNMENT), 0)
        finally:
            probe.close()
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            return False
        raise
    finally:
        system.remove(path)
    return True
