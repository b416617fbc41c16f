"""The calls into the operating system, in one place.

Everything that a store does to files goes through here, so that a test can let any single call fail, cut the power
after it, or keep the files in memory and forget what was never synced.  Python itself resumes calls that a signal
interrupts (PEP 475); short reads and writes are resumed by files.py.
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
    """The real one; subclasses put something in between."""

    def make_folder(self, path: str) -> None:
        """With its parents; there already is fine."""
        os.makedirs(path, exist_ok=True)

    def names(self, folder: str) -> list[str]:
        """What a folder holds, sorted."""
        return sorted(os.listdir(folder))

    def open(self, path: str, flags: int) -> int:
        """A file descriptor."""
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        """Give a file descriptor back."""
        os.close(fd)

    def num_bytes(self, fd: int) -> int:
        """The length of an open file."""
        return os.fstat(fd).st_size

    def free_bytes(self, folder: str) -> int:
        """What an ordinary user may still write there."""
        state = os.statvfs(folder)
        return state.f_bavail * state.f_frsize

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Make the file that long, with its blocks reserved."""
        os.posix_fallocate(fd, 0, num_bytes)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """How many bytes went, which may be fewer."""
        return os.pwrite(fd, data, offset)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """How many bytes came, which may be fewer; 0 behind the end."""
        return os.preadv(fd, [into], offset)

    def sync_data(self, fd: int) -> None:
        """The file's bytes are on the medium, and what is needed to read them."""
        os.fdatasync(fd)

    def sync_folder(self, path: str) -> None:
        """The folder's names are on the medium."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """Atomically, in place of what has the new name."""
        os.replace(old, new)

    def remove(self, path: str) -> None:
        """A file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """A folder, if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(path)

    def lock(self, path: str, owner: str) -> int:
        """A file descriptor that holds the lock file; BlockingIOError, with the owner's text, if it is held."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with self._closing_on_error(fd):
                self._hold(fd, path)
                if self._is_still_named(fd, path):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, owner.encode(), 0)
                    return fd
            os.close(fd)  # whoever had it removed it in between: the name belongs to a newer file, or to none

    def unlock(self, fd: int) -> None:
        """Explicitly, since a forked child may hold a copy of the descriptor."""
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    @staticmethod
    @contextlib.contextmanager
    def _closing_on_error(fd: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def _hold(fd: int, path: str) -> None:
        """The kernel drops the lock when the process dies, so there are no stale locks to judge."""
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
