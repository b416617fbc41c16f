"""Arrays in .npy files, without pickle: numpy's format functions, which know numbers and nothing else."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap, write_array
from numpy.typing import NDArray


def mapped_array(path: str | Path) -> NDArray[Any]:
    """The array of a file, read as it is used.

    Raises:
        OSError: the file is not there.
        ValueError: it is no .npy file, or holds objects.
    """
    return open_memmap(str(path), mode="r")


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write `array` under another name and rename, so that the file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    partial.replace(path)


def digest(array: NDArray[Any]) -> str:
    """A short name of the numbers in `array`, by which two processes compare theirs."""
    return f"{zlib.crc32(np.ascontiguousarray(array).data):08x}"
