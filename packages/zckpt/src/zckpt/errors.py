"""The named errors.

One base, so that a training loop catches everything of ours with one `except`; it derives from Exception, never
from BaseException.  A subclass says whose move it is: the caller's (Input, Mismatch, Exists, NotFound), the
disk's (Write, Read), or nobody's any more (Corrupt).  The class travels between ranks by its name, so every rank
raises the same one; see team.py.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of all errors of this package.

    `rank` is the rank on which the trouble began (-1: no particular one), `path` the file or folder it is about
    ("" when it is about none).
    """

    def __init__(self, message: str, *, rank: int = -1, path: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.path = path


class CheckpointInputError(CheckpointError, ValueError):
    """What was given to save or read cannot be used: a bad tag, shard or object, or ranks that disagree."""


class CheckpointMismatch(CheckpointError, ValueError):
    """The checkpoint is sound, but does not hold what is wanted: missing, extra, reshaped, re-typed tensors."""


class CheckpointStateError(CheckpointError, ValueError):
    """A value beside the tensors (a counter, an option, a schedule, a position) is damaged, or not of this run.

    The message names the file and the key; nothing was loaded.
    """


class CheckpointNotFound(CheckpointError, LookupError):
    """No committed checkpoint of that name; the message offers those that exist."""


class CheckpointCorrupt(CheckpointError):
    """What is on disk contradicts itself: a checksum, a size, or the schema of the manifest."""


class CheckpointReadError(CheckpointError):
    """The operating system refused a read."""


class CheckpointWriteError(CheckpointError):
    """A save failed; earlier checkpoints are as they were."""


class CheckpointExists(CheckpointWriteError):
    """The tag is taken, and replacing it was not asked for."""


class CheckpointWarning(UserWarning):
    """Something that only tidies up went wrong; what was asked for is done."""


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
    """The class that another rank named; the base for a name we do not know (a newer peer)."""
    return _BY_NAME.get(name, CheckpointError)
