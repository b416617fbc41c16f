"""The named errors of the disk tier.

One base, so that a caller catches everything with one `except`.  A subclass says what is left to do: nothing
(Corrupt), make room and write again (Full), look at the device and write again (Failed), wait or point somewhere
else (Busy, Exists, Missing).
"""

from __future__ import annotations

import os


class DiskError(Exception):
    """Base of all errors of the disk tier; `path` is the file or folder it is about."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class DiskCorrupt(DiskError):
    """What is on disk is not what was written: a checksum, a size, or the journal contradicts itself.

    `offset` counts bytes in the region, of the first bad chunk; `expected` and `found` are in words.
    """

    def __init__(self, path: str, region: str, offset: int, expected: str, found: str) -> None:
        super().__init__(
            f"{path}: region {region!r} is damaged in the chunk at byte {offset:,}: expected {expected}, found "
            f"{found}; the values are lost, load a checkpoint",
            path,
        )
        self.region, self.offset, self.expected, self.found = region, offset, expected, found


class DiskFailed(DiskError):
    """The operating system refused a transfer; the committed generation is as it was.

    `errno` is the system's number, `num_bytes` the length of the call that failed (0 where it has none).
    """

    def __init__(self, doing: str, path: str, code: int, num_bytes: int = 0) -> None:
        size = f" ({num_bytes:,} bytes)" if num_bytes else ""
        super().__init__(
            f"{path}: could not {doing}{size}: {os.strerror(code)} (errno {code}); what was committed is as it was: "
            "write again what was not, or discard() it",
            path,
        )
        self.errno, self.num_bytes = code, num_bytes


class DiskFull(DiskFailed):
    """There is no room; `needed_bytes` are asked for, `free_bytes` were free when it failed."""

    def __init__(self, doing: str, path: str, code: int, needed_bytes: int, free_bytes: int) -> None:
        DiskError.__init__(
            self,
            f"{path}: could not {doing}: {os.strerror(code)}: it needs {needed_bytes:,} bytes and {free_bytes:,} are "
            "free; what was committed is as it was: make room, or choose a folder on another disk",
            path,
        )
        self.errno, self.num_bytes = code, needed_bytes
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class DiskBusy(DiskError):
    """Another store, of this process or of another, has the folder open."""


class DiskExists(DiskError):
    """The folder holds a store that somebody left; open it or remove it."""


class DiskMissing(DiskError, LookupError):
    """The folder holds no store."""


class DiskClosed(DiskError):
    """The store is closed, or was closed before the transfer was done."""
