"""Reader of Megatron's indexed datasets, the index files of DeepSpeed's data analyzer.

A pair is `<path>.idx` and `<path>.bin`.  The first holds a magic number, the dtype, the number of entries, the
length of each entry (int32) and its byte offset (int64); the second the numbers.  In `index_to_sample` entry i
lists the samples of the i-th metric value, in `index_to_metric` entry i is that value, ascending.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of entries, number of documents
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2", 9: "u4", 10: "u8"}


def read_pair(samples: str | Path, metrics: str | Path) -> dict[str, NDArray[Any]]:
    """Return {samples, metrics}: (num_samples,) each, by difficulty, ties by sample.

    Raises:
        ValueError: a file is missing or invalid, or the two do not match.
    """
    sizes, members = _read(samples)
    value_sizes, values = _read(metrics)
    if len(sizes) != len(value_sizes) or (value_sizes != 1).any():
        raise ValueError(
            f"{samples} has {len(sizes)} entries and {metrics} {len(value_sizes)} with {int(value_sizes.sum())} "
            "numbers; each entry of samples needs one number of the metric"
        )
    spread = np.repeat(values, sizes)
    order = np.lexsort((members, spread))
    return {"samples": members[order].astype(np.int64), "metrics": spread[order]}


def read_order(samples: str | Path) -> NDArray[np.int64]:
    """Return (num_samples,) int64: the samples in the order of the entries of `samples`."""
    sizes, members = _read(samples)
    entry = np.repeat(np.arange(len(sizes)), sizes)
    order: NDArray[np.int64] = members[np.lexsort((members, entry))].astype(np.int64)
    return order


def _read(path: str | Path) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Return (lengths of the entries, all numbers) of one indexed dataset."""
    stem = str(path).removesuffix(".idx").removesuffix(".bin")
    try:
        index = Path(f"{stem}.idx").read_bytes()
        magic, version, code, count, _documents = _HEADER.unpack_from(index)
        if magic != _MAGIC or version != 1 or code not in _DTYPES:
            raise ValueError(f"magic {magic!r}, version {version}, dtype {code}")
        sizes = np.frombuffer(index, dtype="<i4", count=count, offset=_HEADER.size)
        numbers = np.memmap(f"{stem}.bin", dtype="<" + _DTYPES[code], mode="r")
    except (OSError, struct.error, ValueError) as error:
        raise ValueError(
            f"{path} is neither a .npy file nor a Megatron index (.idx beside .bin): {error}. "
            "zengine.data.DataAnalyzer writes .npy files"
        ) from None
    if int(sizes.sum()) != len(numbers):
        raise ValueError(f"{stem}.idx speaks of {int(sizes.sum())} numbers, {stem}.bin has {len(numbers)}")
    return sizes, numbers
