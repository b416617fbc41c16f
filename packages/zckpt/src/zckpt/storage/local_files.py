"""Local files: writing past the page cache, reading through it.

Problem.  A save writes each byte once.  Through the page cache, each byte is first copied into a fresh page.  That
costs more processor time than hashing the byte, and evicts what the training had cached.

Design.  `LocalWriter` collects bytes in an aligned buffer, which a thread of its own writes with O_DIRECT while the
caller fills a second one, so that the disk never waits for hashing and copying.  Where O_DIRECT is not supported
(tmpfs), and for the end of a file, writes are plain.  The rules of storage.Writer hold either way: nothing survives a
power cut before `sync`.  `PlainReader` reads through the page cache (see frugal_reader.py).

Rejected: O_DIRECT from tensor memory (neither the tensors nor the offsets in a safetensors file are aligned);
starting write-back early with posix_fadvise (measured at a third of the speed); allocating the file first (no gain);
one direct writer for this package and for zpartition's offload: there, threads read and write aligned slots in place,
many at a time, from the memory of tensors; here, one stream of unaligned bytes goes to a new file through a copy.
They share a flag and a loop over short writes, and each package works without the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import final

import attrs
import numpy as np

BUFFER_NBYTES = 4 << 20  # of each of two write buffers: a multiple of any file system's block
LEAST_NBYTES = 256 << 10  # smaller files and ends of files are not worth a direct write
_BLOCK_NBYTES = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)


@final
@attrs.define(eq=False)
class LocalWriter:
    """A storage.Writer with O_DIRECT, which writes one buffer while the caller fills the other.

    Invariant: the file holds everything written, except the buffers that the thread has not written yet and then the
    last `held` bytes, which are at the start of `buffer`.
    """

    path: Path
    fd: int
    buffer: mmap.mmap | None = None  # allocated by the first write; untouched pages cost nothing
    held: int = 0  # bytes in the buffer
    thread: _BufferThread | None = None  # started by the second buffer: small files never pay for it

    @classmethod
    def create(cls, path: Path) -> LocalWriter:
        return cls(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def write(self, data: memoryview) -> None:
        if not data.nbytes:
            return
        if self.buffer is None:
            self.buffer = huge_pages(BUFFER_NBYTES)
        rest = np.frombuffer(data, np.uint8)
        while len(rest):
            if self.held == BUFFER_NBYTES:
                self._swap()
            into = np.frombuffer(self.buffer, np.uint8)
            count = min(BUFFER_NBYTES - self.held, len(rest))
            np.copyto(into[self.held : self.held + count], rest[:count])  # releases the interpreter's lock
            self.held, rest = self.held + count, rest[count:]

    def sync(self) -> None:
        self._write_rest()
        with path_in_errors(self.path):
            os.fsync(self.fd)

    def __enter__(self) -> LocalWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                self._write_rest()
        finally:
            self._stop()
            with path_in_errors(self.path):
                os.close(self.fd)

    def _swap(self) -> None:
        """Give the full buffer to the thread, and take an empty one."""
        assert self.buffer is not None
        try:
            self.thread = self.thread or _BufferThread(self.path, self.fd)
            self.buffer = self.thread.swap(self.buffer)
        except RuntimeError:  # no more threads available: write here
            with path_in_errors(self.path):
                _write_all(self.fd, memoryview(self.buffer)[: self.held], _O_DIRECT)
        self.held = 0

    def _write_rest(self) -> None:
        """Wait for the thread, and write what is held: whole blocks with O_DIRECT, if they are worth it."""
        if (thread := self._stop()) is not None:
            thread.check()
        if self.buffer is None:
            return
        held, self.held = memoryview(self.buffer)[: self.held], 0
        blocks = len(held) // _BLOCK_NBYTES * _BLOCK_NBYTES if len(held) >= LEAST_NBYTES else 0
        with path_in_errors(self.path):
            _write_all(self.fd, held[:blocks], _O_DIRECT)
            _write_all(self.fd, held[blocks:], 0)

    def _stop(self) -> _BufferThread | None:
        """End the thread after its last write; a later write starts another."""
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.join()
        return thread


@final
class _BufferThread:
    """Writes full buffers to a file in order, while the caller fills another."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        self.error: BaseException | None = None  # nothing is written after it
        self.full: SimpleQueue[mmap.mmap | None] = SimpleQueue()  # None: the end
        self.empty: SimpleQueue[mmap.mmap] = SimpleQueue()
        self.empty.put(huge_pages(BUFFER_NBYTES))
        self.thread = threading.Thread(target=self._run, name="zckpt-write", daemon=True)
        self.thread.start()

    def swap(self, full: mmap.mmap) -> mmap.mmap:
        """Queue a full buffer; return an empty one.  Raises the error of an earlier write."""
        self.full.put(full)
        empty = self.empty.get()
        self.check()
        return empty

    def join(self) -> None:
        """Wait until everything is written, or failed."""
        self.full.put(None)
        self.thread.join()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while (buffer := self.full.get()) is not None:
            try:
                if self.error is None:
                    with path_in_errors(self.path):
                        _write_all(self.fd, memoryview(buffer)[:BUFFER_NBYTES], _O_DIRECT)
            except BaseException as error:
                self.error = error
            self.empty.put(buffer)


def huge_pages(nbytes: int) -> mmap.mmap:
    """Zeroed memory of this process on huge pages, where the system has them.

    A disk writes from them 1.4 times as fast, and the first touch costs a tenth.  Shared mappings, mmap's default,
    usually get none.  Forked children do not inherit the memory: copies on write would double it.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, nbytes)
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with contextlib.suppress(OSError):  # not every kernel supports them
            made.madvise(advice)
    return made


def _write_all(fd: int, data: memoryview, direct: int) -> None:
    """Write all of `data` at the file's position; `direct`: O_DIRECT, for whole aligned blocks, or 0."""
    if len(data):
        _set_direct(fd, direct)
    while len(data):
        try:
            data = data[os.write(fd, data) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            direct = 0  # the file system accepts the flag and rejects the write
            _set_direct(fd, 0)


def _set_direct(fd: int, direct: int) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & _O_DIRECT != direct:
        with contextlib.suppress(OSError):  # unsupported: writes stay plain
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_O_DIRECT | direct)


@final
@attrs.define(eq=False)
class PlainReader:
    """Reads through the page cache, which reads ahead."""

    path: Path
    fd: int
    nbytes: int
    step_nbytes: int = 512 << 10  # read, then hashed, at once: fits a core's cache

    def read_into(self, offset: int, buffer: memoryview) -> None:
        rest = buffer.cast("B")
        with path_in_errors(self.path):
            while len(rest):
                count = os.preadv(self.fd, [rest], offset)
                if count == 0:
                    raise OSError(errno.EIO, f"file ends before byte {offset + len(rest):,}")
                offset, rest = offset + count, rest[count:]

    def read_ahead(self, ahead: bool) -> None:
        """Let the kernel read ahead, or read only what is asked for."""
        with contextlib.suppress(OSError, AttributeError):  # a hint
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL if ahead else os.POSIX_FADV_RANDOM)

    def __enter__(self) -> PlainReader:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)


class path_in_errors(contextlib.AbstractContextManager[None]):  # noqa: N801 - reads as a verb
    """Add the path to OSErrors of calls on a file descriptor, which lack it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self.path)
