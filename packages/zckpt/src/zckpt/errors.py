"""Error classes.

One base class, so that a training loop catches every error of this package with one `except`; it derives from
Exception, never from BaseException.  A subclass names the cause: the caller (Input, Mismatch, Exists, NotFound), the
disk (Write, Read), or damaged data (Corrupt, State).  The class travels between ranks by its name, so every rank
raises the same one; see ranks.py.
"""

from __future__ import annotations

import errno
import os


class CheckpointError(Exception):
    """Base of all errors of this package.

    `rank`: the rank that failed first (-1: none in particular).  `path`: the affected file or folder ("": none).
    """

    def __init__(self, message: str, *, rank: int = -1, path: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.path = path


class CheckpointInputError(CheckpointError, ValueError):
    """Invalid argument to save or read: a bad tag, shard or object, or arguments that differ between ranks."""


class CheckpointMismatch(CheckpointError, ValueError):
    """The checkpoint is valid but does not match the request: missing, extra, reshaped or re-typed tensors."""


class CheckpointStateError(CheckpointError, ValueError):
    """A value beside the tensors (a counter, an option, a schedule, a position) is damaged or belongs to another run.

    The message names the file and the key; nothing was loaded.
    """


class CheckpointNotFound(CheckpointError, LookupError):
    """No committed checkpoint of that name; the message lists those that exist."""


class CheckpointCorrupt(CheckpointError):
    """Data on disk is inconsistent: a checksum, a size, or the schema of the manifest."""


class CheckpointReadError(CheckpointError):
    """The operating system failed a read."""


class CheckpointWriteError(CheckpointError):
    """A save failed; earlier checkpoints are unchanged."""


class CheckpointExists(CheckpointWriteError):
    """The tag exists, and `overwrite` was not set."""


class CheckpointWarning(UserWarning):
    """A cleanup step failed; the requested operation succeeded."""


_BY_NAME: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        CheckpointInputError,
        CheckpointMismatch,
        CheckpointStateError,
        CheckpointNotFound,
        CheckpointCorrupt,
        CheckpointReadError,
        CheckpointWriteError,
        CheckpointExists,
    )
}


def error_class(name: str) -> type[CheckpointError]:
    """The class of this name; the base class for an unknown name (from a newer peer)."""
    return _BY_NAME.get(name, CheckpointError)


def os_error_path(error: OSError) -> str:
    return "" if error.filename is None else os.fspath(error.filename)


_HINTS = {
    errno.ENOENT: "; does every rank see the same folder?",
    errno.ENOTDIR: "; a part of this path is a file: give a path to a folder",
}


def os_error_text(error: OSError) -> str:
    """ "runs/a/x: No space left on device (ENOSPC)"."""
    code = errno.errorcode.get(error.errno or 0, "OSError")
    hint = _HINTS.get(error.errno or 0, "")
    return f"{os_error_path(error) or 'unknown path'}: {error.strerror or error} ({code}){hint}"
