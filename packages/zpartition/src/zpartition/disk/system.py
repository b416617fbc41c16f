"""System calls of a store, in one place.

A store touches files through this class only, so that a test can make any call fail, cut the power after it, or keep
the files in memory and drop what was never synced.  Python resumes calls that a signal interrupts (PEP 475); files.py
resumes short reads and writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
OLD = os.O_RDWR | os.O_CLOEXEC
DIRECT = getattr(os, "O_DIRECT", 0)


class System:
    """The real system; subclasses intercept calls."""

    def make_folder(self, path: str) -> None:
        """Create a folder with its parents; it may exist."""
        os.makedirs(path, exist_ok=True)

    def names(self, folder: str) -> list[str]:
        """List a folder, sorted."""
        return sorted(os.listdir(folder))

    def open(self, path: str, flags: int) -> int:
        """Open a file; returns the file descriptor."""
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        """Close a file descriptor."""
        os.close(fd)

    def num_bytes(self, fd: int) -> int:
        """Return the length of an open file."""
        return os.fstat(fd).st_size

    def free_bytes(self, folder: str) -> int:
        """Return the bytes that an unprivileged user may still write."""
        state = os.statvfs(folder)
        return state.f_bavail * state.f_frsize

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Extend a file to `num_bytes` and reserve its blocks."""
        os.posix_fallocate(fd, 0, num_bytes)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at `offset`; returns the number of bytes written, which may be fewer."""
        return os.pwrite(fd, data, offset)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Read at `offset`; returns the number of bytes read, which may be fewer, and 0 past the end."""
        return os.preadv(fd, [into], offset)

    def sync_data(self, fd: int) -> None:
        """Flush a file's bytes to the medium, with the metadata needed to read them."""
        os.fdatasync(fd)

    def sync_folder(self, path: str) -> None:
        """Flush a folder's names to the medium."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """Rename atomically, replacing an existing file."""
        os.replace(old, new)

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(path)

    def lock(self, path: str, owner: str) -> int:
        """Lock a file; returns its descriptor.  Raises BlockingIOError with the owner's text if it is locked."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with self._close_on_error(fd):
                self._hold(fd, path)
                if self._is_still_named(fd, path):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, owner.encode(), 0)
                    return fd
            os.close(fd)  # the previous owner removed it in between: the name belongs to a newer file, or to none

    def unlock(self, fd: int) -> None:
        """Unlock explicitly, since a forked child may hold a copy of the descriptor."""
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    @staticmethod
    @contextlib.contextmanager
    def _close_on_error(fd: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def _hold(fd: int, path: str) -> None:
        """Take the lock.  The kernel drops it when the process dies, so locks are never stale."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(fd, 1000, 0).decode(errors="replace").strip()
            raise BlockingIOError(error.errno, owner or "an unnamed owner", path) from None

    @staticmethod
    def _is_still_named(fd: int, path: str) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(path))
        except FileNotFoundError:
            return False
