"""Arrays in .npy files, without pickle."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap, write_array
from numpy.typing import NDArray


def mapped_array(path: str | Path) -> NDArray[Any]:
    """Return a memory map of a file's array.

    Raises:
        OSError: the file does not exist.
        ValueError: it is not a .npy file, or holds objects.
    """
    return open_memmap(str(path), mode="r")


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write `array` atomically: under another name, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    partial.replace(path)


def digest(array: NDArray[Any]) -> str:
    """Return a checksum of `array`, to compare it between processes."""
    return f"{zlib.crc32(np.ascontiguousarray(array).data):08x}"
