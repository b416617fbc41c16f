"""Reading a large file past the page cache.

A load reads each byte once.  Through the page cache that byte is copied into a fresh page first, which costs more
processor time than proving and using it, and pushes out what the training had cached.  So what is not in the cache is
read with O_DIRECT into an aligned buffer of the reading thread, and copied from there while the other threads wait
for the disk.  What is in the cache already is taken from it (RWF_NOWAIT).  Measured on a virtual disk: half the
processor time of a load.

That is right for bytes that one process wants and wants once; ranks of a host that read the same bytes, or a load
that proves all before it fills anything, are better off with the page cache (`PlainReader`).

Rejected: O_DIRECT into the tensors themselves (offsets in a safetensors file are not aligned, and neither need the
tensors be); mapping the file (a page fault for each 4 KiB, and an error of the disk is a signal).
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import final

import attrs
import numpy as np
from numpy.typing import NDArray

from zckpt.storage.local_writer import path_in_errors

STEP_NBYTES = 4 << 20  # read at once: a multiple of any file system's block
LEAST_NBYTES = 256 << 10  # less than this is not worth an aligned read around it
_BLOCK_NBYTES = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


@final
@attrs.define(eq=False)
class PlainReader:
    """Through the page cache."""

    path: Path
    fd: int
    nbytes: int
    step_nbytes: int = 1 << 20  # what is read and then hashed at once: fits a core's cache

    def read_into(self, offset: int, buffer: memoryview) -> None:
        rest = buffer.cast("B")
        with path_in_errors(self.path):
            while len(rest):
                count = os.preadv(self.fd, [rest], offset)
                if count == 0:
                    raise OSError(errno.EIO, f"file ends before byte {offset + len(rest):,}")
                offset, rest = offset + count, rest[count:]

    def __enter__(self) -> PlainReader:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)


@final
class _Buffer(threading.local):
    """Aligned memory of each thread's own."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, STEP_NBYTES + 2 * _BLOCK_NBYTES)

    def view(self, nbytes: int) -> memoryview:
        return memoryview(self.memory)[:nbytes]

    def array(self, start: int, stop: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.memory, np.uint8)[start:stop]


@final
@attrs.define(eq=False)
class DirectReader:
    """Past the page cache, where what is wanted is not in it.  Owns `plain` and `fd`, two openings of one file."""

    plain: PlainReader
    fd: int  # opened with O_DIRECT; -1: the file system refused
    buffer: _Buffer = attrs.field(factory=_Buffer)
    step_nbytes: int = STEP_NBYTES

    @classmethod
    def over(cls, plain: PlainReader) -> DirectReader | PlainReader:
        """A direct reader of the same file, or `plain` where there is no such thing."""
        try:
            fd = os.open(plain.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | _O_DIRECT)
        except OSError:
            return plain
        if not _O_DIRECT or not os.path.sameopenfile(fd, plain.fd):
            os.close(fd)
            return plain
        return cls(plain, fd)

    @property
    def nbytes(self) -> int:
        return self.plain.nbytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        data = buffer.cast("B")
        for start in range(0, len(data), STEP_NBYTES):
            part = data[start : start + STEP_NBYTES]
            if (
                len(part) < LEAST_NBYTES
                or self._is_cached(offset + start, part)
                or not self._read(offset + start, part)
            ):
                self.plain.read_into(offset + start, part)

    def _is_cached(self, offset: int, part: memoryview) -> bool:
        """True if the first and the last block are in the page cache; a heuristic that costs microseconds."""
        try:
            ends = [(offset, part[:1]), (offset + len(part) - 1, part[-1:])]
            return bool(_NOWAIT) and all(os.preadv(self.plain.fd, [one], at, _NOWAIT) == 1 for at, one in ends)
        except OSError:  # EAGAIN: not in the cache; EOPNOTSUPP: nobody knows
            return False

    def _read(self, offset: int, part: memoryview) -> bool:
        """Whole blocks around the part, and the part out of them; False where that cannot be done here."""
        if self.fd < 0:
            return False
        skip = offset % _BLOCK_NBYTES
        nbytes = -(-(skip + len(part)) // _BLOCK_NBYTES) * _BLOCK_NBYTES
        try:
            count = os.preadv(self.fd, [self.buffer.view(nbytes)], offset - skip)
        except OSError as error:
            if error.errno != errno.EINVAL:
                error.filename = error.filename or str(self.plain.path)
                raise
            return False  # the file system takes the flag and not the read
        if count < skip + len(part):  # interrupted, or the file is shorter: the plain way tells which
            return False
        into = np.frombuffer(part, np.uint8)
        np.copyto(into, self.buffer.array(skip, skip + len(part)))  # releases the interpreter's lock
        return True

    def __enter__(self) -> DirectReader:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)
        self.plain.__exit__(*exc)
