"""Errors of the disk tier.

All derive from `DiskError`, so that one `except` catches them.  The subclass says what a caller can do: nothing
(Corrupt), make room and write again (Full), check the device and write again (Failed), wait or choose another folder
(Busy, Exists, Missing).
"""

from __future__ import annotations

import os


class DiskError(Exception):
    """Base class of all errors of the disk tier; `path` is the file or folder."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class DiskCorrupt(DiskError):
    """Data on disk differ from what was written: a checksum, a size or the journal does not match.

    `offset` is the byte offset of the first bad chunk in the region; `expected` and `found` are in words.
    """

    def __init__(self, path: str, region: str, offset: int, expected: str, found: str) -> None:
        super().__init__(
            f"{path}: region {region!r} is corrupt in the chunk at byte {offset:,}: expected {expected}, found "
            f"{found}. Its values are lost; load a checkpoint",
            path,
        )
        self.region, self.offset, self.expected, self.found = region, offset, expected, found


class DiskFailed(DiskError):
    """The operating system failed a call; the last commit is intact.

    `errno` is the system's error number, `num_bytes` the length of the failed call (0 if it has none).
    """

    def __init__(self, action: str, path: str, code: int, num_bytes: int = 0) -> None:
        size = f" ({num_bytes:,} bytes)" if num_bytes else ""
        super().__init__(
            f"{path}: could not {action}{size}: {os.strerror(code)} (errno {code}). The last commit is intact; write "
            "the uncommitted values again, or discard() them",
            path,
        )
        self.errno, self.num_bytes = code, num_bytes


class DiskFull(DiskFailed):
    """The disk is full: the call needs `needed_bytes`, and `free_bytes` were free when it failed."""

    def __init__(self, action: str, path: str, code: int, needed_bytes: int, free_bytes: int) -> None:
        DiskError.__init__(
            self,
            f"{path}: could not {action}: {os.strerror(code)}: {needed_bytes:,} bytes are needed and {free_bytes:,} "
            "are free. The last commit is intact; make room, or choose a folder on another disk",
            path,
        )
        self.errno, self.num_bytes = code, needed_bytes
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class DiskBusy(DiskError):
    """Another store, in this or another process, has the folder open."""


class DiskExists(DiskError):
    """The folder holds a store that another process left; open it or remove it."""


class DiskMissing(DiskError, LookupError):
    """The folder holds no store."""


class DiskClosed(DiskError):
    """The store is closed, or was closed before the transfer finished."""
