"""Mapping of a whole file into private memory."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from zckpt.errors import CheckpointCorrupt, CheckpointReadError

UNMAPPED = mmap.mmap(-1, 1)  # in place of a mapping that has been released


def map_file(path: Path) -> mmap.mmap:
    """Map a plain file; a write to the memory never reaches it.

    Raises CheckpointReadError (the operating system, or not a plain file), CheckpointCorrupt (empty).
    """
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointReadError(f"{path} is not a plain file", path=str(path))
        if not os.fstat(fd).st_size:
            raise CheckpointCorrupt(f"{path} is empty", path=str(path))
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointReadError(f"{path}: {error.strerror or error}", path=str(path)) from error
    finally:
        if fd >= 0:
            os.close(fd)
