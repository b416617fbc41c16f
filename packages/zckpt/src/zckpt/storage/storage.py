"""File operations of a checkpoint: the `Storage` protocol, and its local implementation.

All disk access of this package goes through this protocol, so that a test can fail any operation or cut the power
after it (zckpt.testing), an object store can be another implementation, and the rules about links and short writes
have one place.

Rules of every implementation: an operation either happens or raises OSError with the path in `filename`; a link as
the last component of a path is never followed; `create` raises if the name exists; written data survives a power cut
only after `sync` on the file AND `sync_folder` on the folder that names it.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Protocol, final

import attrs

from zckpt.storage.frugal_reader import UNKNOWN, Access, FrugalReader
from zckpt.storage.local_files import LocalWriter, PlainReader, path_in_errors


class PathKind(enum.Enum):
    """File type of a path; links are not followed."""

    ABSENT = "absent"
    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"  # device, socket, pipe


class Writer(Protocol):
    """A new file being written; its `with` block closes it without syncing."""

    def write(self, data: memoryview) -> None:
        """Write all of `data` (bytes, any length), or raise OSError."""
        ...

    def sync(self) -> None:
        """Make the data survive a power cut.  After an error the file is lost: do not retry."""
        ...

    def __enter__(self) -> Writer: ...
    def __exit__(self, *exc: object) -> None: ...


class Reader(Protocol):
    """An open plain file; thread-safe."""

    @property
    def nbytes(self) -> int: ...

    @property
    def step_nbytes(self) -> int:
        """Recommended read size of one call, for large ranges."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from byte `offset`; raises OSError if the file ends before."""
        ...

    def __enter__(self) -> Reader: ...
    def __exit__(self, *exc: object) -> None: ...


class Lock(Protocol):
    """The right to save into one root."""

    @property
    def is_exclusive(self) -> bool:
        """False where the file system has no locks: then leftovers of other jobs must not be swept."""
        ...

    def release(self) -> None: ...


class Storage(Protocol):
    """The file system operations that checkpoints need."""

    def kind(self, path: Path) -> PathKind: ...
    def names(self, folder: Path) -> list[str]: ...
    def nbytes(self, path: Path) -> int: ...
    def free_bytes(self, folder: Path) -> int: ...
    def open(self, path: Path, *, access: Access = UNKNOWN) -> Reader: ...

    def create(self, path: Path) -> Writer: ...
    def make_folder(self, path: Path) -> None: ...
    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically; replaces a plain file at `new`."""
        ...

    def remove(self, path: Path) -> None:
        """Remove one file, one link, or one empty folder."""
        ...

    def sync_folder(self, folder: Path) -> None: ...
    def lock(self, path: Path, owner: str) -> Lock:
        """Acquire without waiting; raises BlockingIOError with the owner's text if another job holds the lock.

        The lock ends with the process that holds it, even if that is killed.
        """
        ...


@final
@attrs.define(eq=False)
class _FileLock:
    """flock: the kernel releases it when the process dies, so locks are never stale."""

    fd: int
    is_exclusive: bool

    def release(self) -> None:
        if self.fd >= 0:
            if self.is_exclusive:
                fcntl.flock(self.fd, fcntl.LOCK_UN)  # explicit: a forked child may hold a copy of the fd
            os.close(self.fd)
            self.fd = -1


@final
@attrs.frozen
class LocalStorage:
    """A POSIX file system."""

    def kind(self, path: Path) -> PathKind:
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return PathKind.ABSENT
        kinds = {stat.S_IFREG: PathKind.FILE, stat.S_IFDIR: PathKind.FOLDER, stat.S_IFLNK: PathKind.LINK}
        return kinds.get(stat.S_IFMT(mode), PathKind.OTHER)

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))

    def nbytes(self, path: Path) -> int:
        return os.lstat(path).st_size

    def free_bytes(self, folder: Path) -> int:
        state = os.statvfs(folder)
        return state.f_bavail * state.f_frsize

    def open(self, path: Path, *, access: Access = UNKNOWN) -> Reader:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        plain = PlainReader(path, fd, state.st_size)
        plain.read_ahead(True)
        return FrugalReader.over(plain, access) if access.is_once else plain

    def create(self, path: Path) -> Writer:
        return LocalWriter.create(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        if self.kind(path) is PathKind.FOLDER:
            os.rmdir(path)
        else:
            os.unlink(path)

    def sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with path_in_errors(folder):
                os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, path: Path, owner: str) -> Lock:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held_by = os.pread(fd, 1000, 0).decode(errors="replace").strip()
            os.close(fd)
            raise BlockingIOError(errno.EWOULDBLOCK, held_by or "an unnamed owner", str(path)) from None
        except OSError:  # no locks on this file system
            return _FileLock(fd, is_exclusive=False)
        with contextlib.suppress(OSError):  # the text serves only the message above
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner.encode(), 0)
        return _FileLock(fd, is_exclusive=True)


LOCAL = LocalStorage()


def read_all(storage: Storage, path: Path, limit_bytes: int) -> bytes:
    """Read a whole small file; raises OSError (EFBIG) if it is larger than `limit_bytes`."""
    with storage.open(path) as reader:
        if reader.nbytes > limit_bytes:
            raise OSError(errno.EFBIG, f"{reader.nbytes:,} bytes, more than {limit_bytes:,}", str(path))
        data = bytearray(reader.nbytes)
        reader.read_into(0, memoryview(data))
        return bytes(data)
