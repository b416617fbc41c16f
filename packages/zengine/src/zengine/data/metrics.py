"""Metric files: the difficulty of each sample, and the index that a curriculum queries.

    index = MetricIndex.of([5, 3, 9])          # from one number per sample, in memory
    index = MetricIndex.load(samples, metrics) # from files, memory-mapped
    index.count_by_value(5)                    # 2: samples with a metric of at most 5
    index.places()                             # (3,): the rank of each sample in the order of difficulty

An index is two arrays of equal length: the samples by difficulty, ties by sample, and their metrics.  Every query of
a curriculum is "the first k samples": a sample is admitted if its place is below k.

On disk the arrays are two .npy files, written by `DataAnalyzer` without pickle.  Megatron's indexed datasets, which
DeepSpeed's analyzer writes, are read too: a pair `<path>.idx`, `<path>.bin`.  The .idx holds a magic number, the
dtype, the number of entries, the length of each entry (int32) and its byte offset (int64); the .bin holds the
numbers.  In `index_to_sample`, entry i lists the samples of the i-th metric value; in `index_to_metric`, entry i is
that value, ascending.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.lib.format import open_memmap, write_array
from numpy.typing import NDArray

SAMPLE_FILE = "sample_to_metric.npy"
SAMPLES_FILE = "index_to_sample.npy"
METRIC_FILE = "index_to_metric.npy"


class MetricError(ValueError):
    """Mismatch between a metric and the data, or between the files of a metric."""


@attrs.frozen(kw_only=True, eq=False)
class MetricIndex:
    """Samples by difficulty.  Invariant: `samples` is a permutation and `metrics` does not decrease."""

    name: str
    samples: NDArray[Any]  # (num_samples,) integers: samples in order of difficulty
    metrics: NDArray[Any]  # (num_samples,) numbers: the metric of each of them

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[Any], name: str = "metric") -> MetricIndex:
        """Build the index from the metric of each sample.

        Raises MetricError unless `values` are 1-D, real and finite.
        """
        array = np.asarray(values)
        if array.ndim != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise MetricError(
                f"metric {name!r} needs one finite number for each sample, got {array.dtype} of shape {array.shape}"
            )
        samples = np.argsort(array, kind="stable")
        return cls(name=name, samples=samples, metrics=array[samples])

    @classmethod
    def load(cls, samples: str | Path, metrics: str | Path = "", name: str = "metric") -> MetricIndex:
        """Load .npy files, or Megatron pairs (with or without the suffix .idx).

        Without `metrics` the metric of a sample is its place in the order, which is enough for percentiles.

        Raises:
            MetricError: a file is missing, or the files do not match each other.
        """
        if str(samples).endswith(".npy"):
            order = _open_named(samples, name)
            index = cls(
                name=name, samples=order, metrics=_open_named(metrics, name) if metrics else np.arange(len(order))
            )
        elif metrics:
            index = cls(name=name, **read_megatron_pair(samples, metrics))
        else:
            order = read_megatron_order(samples)
            index = cls(name=name, samples=order, metrics=np.arange(len(order)))
        if index.samples.shape != index.metrics.shape or index.samples.ndim != 1:
            raise MetricError(
                f"metric {name!r}: {samples} has {index.samples.shape} entries and {metrics} {index.metrics.shape}; "
                "both need one entry for each sample, as DataAnalyzer writes them"
            )
        return index

    def check_covers(self, num_samples: int) -> None:
        """Raise MetricError unless the index covers a dataset of `num_samples`."""
        if len(self.samples) != num_samples:
            raise MetricError(
                f"metric {self.name!r} has {len(self.samples)} samples and the dataset {num_samples}: run "
                "DataAnalyzer on this dataset, in its training order"
            )

    def count_by_value(self, value: float) -> int:
        """Count the samples with a metric of at most `value`."""
        return int(np.searchsorted(self.metrics, value, side="right"))

    def count_by_percentile(self, percentile: int, of: int = 100) -> int:
        """Count the samples in the easiest `percentile` / `of` of all."""
        return len(self.samples) * min(percentile, of) // of

    def places(self) -> NDArray[np.int64]:
        """Return (num_samples,) int64: the place of each sample in the order of difficulty."""
        places = np.empty(len(self.samples), dtype=np.int64)
        places[self.samples] = np.arange(len(self.samples))
        return places


def _open_named(path: str | Path, name: str) -> NDArray[Any]:
    try:
        return open_array(path)
    except (OSError, ValueError) as error:
        raise MetricError(
            f"metric {name!r}: {path} cannot be read ({error}); DataAnalyzer(...).run() writes {SAMPLES_FILE} and "
            f"{METRIC_FILE} for each metric"
        ) from None


def lengths_of(dataset: Any) -> NDArray[np.int64]:
    """Return (num_samples,) int64: the number of tokens of each sample.  Reads the whole dataset.

    A sample is a mapping with "input_ids", a tuple whose first member is the tokens, or the tokens themselves.
    """
    return np.fromiter((length_of(dataset[i]) for i in range(len(dataset))), dtype=np.int64, count=len(dataset))


def length_of(sample: Any) -> int:
    """Return the number of tokens of one sample.

    Raises:
        MetricError: the sample has no length.
    """
    tokens = sample
    if hasattr(sample, "keys"):
        tokens = sample["input_ids"] if "input_ids" in sample else next(iter(sample.values()), ())
    elif isinstance(sample, tuple) and sample:
        tokens = sample[0]
    try:
        return len(tokens)
    except TypeError:
        raise MetricError(
            f"a sample of type {type(sample).__name__} has no number of tokens; pass the lengths as a metric file "
            "(zengine.data.DataAnalyzer writes one)"
        ) from None


def open_array(path: str | Path) -> NDArray[Any]:
    """Return a memory map of a file's array.

    Raises:
        OSError: the file does not exist.
        ValueError: the file is not a .npy file, or contains Python objects.
    """
    return open_memmap(str(path), mode="r")


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Write `array` atomically: to a temporary name that is then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    partial.replace(path)


def digest(array: NDArray[Any]) -> str:
    """Return a checksum of `array`, for comparison between ranks."""
    return f"{zlib.crc32(np.ascontiguousarray(array).data):08x}"


_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of entries, number of documents
# DeepSpeed has used some codes in two ways (since 0.19: the first); the size of the .bin tells which.
_DTYPES: dict[int, tuple[str, ...]] = {
    1: ("u1",),
    2: ("i1",),
    3: ("i2",),
    4: ("i4",),
    5: ("i8",),
    6: ("u2", "f8"),
    7: ("u4", "f8"),
    8: ("u8", "u2"),
    9: ("u4",),
    10: ("u8",),
}


def read_megatron_pair(samples: str | Path, metrics: str | Path) -> dict[str, NDArray[Any]]:
    """Return {"samples", "metrics"}: (num_samples,) each, by difficulty, ties by sample.

    Raises:
        ValueError: a file is missing or invalid, or the two do not match.
    """
    sizes, members = _read_megatron(samples)
    value_sizes, values = _read_megatron(metrics)
    if len(sizes) != len(value_sizes) or (value_sizes != 1).any():
        raise ValueError(
            f"{samples} has {len(sizes)} entries and {metrics} {len(value_sizes)} with {int(value_sizes.sum())} "
            "numbers; each entry of samples needs one number of the metric"
        )
    spread = np.repeat(values, sizes)
    order = np.lexsort((members, spread))
    return {"samples": members[order].astype(np.int64), "metrics": spread[order]}


def read_megatron_order(samples: str | Path) -> NDArray[np.int64]:
    """Return (num_samples,) int64: the samples in the order of the entries of `samples`."""
    sizes, members = _read_megatron(samples)
    entry = np.repeat(np.arange(len(sizes)), sizes)
    order: NDArray[np.int64] = members[np.lexsort((members, entry))].astype(np.int64)
    return order


def _read_megatron(path: str | Path) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Return (lengths of the entries, all numbers) of one indexed dataset."""
    stem = str(path).removesuffix(".idx").removesuffix(".bin")
    try:
        index = Path(f"{stem}.idx").read_bytes()
        magic, version, code, count, _documents = _HEADER.unpack_from(index)
        if magic != _MAGIC or version != 1 or code not in _DTYPES:
            raise ValueError(f"magic {magic!r}, version {version}, dtype {code}")
        sizes = np.frombuffer(index, dtype="<i4", count=count, offset=_HEADER.size)
        num_bytes, total = Path(f"{stem}.bin").stat().st_size, int(sizes.sum(dtype=np.int64))
        kinds = [kind for kind in _DTYPES[code] if np.dtype(kind).itemsize * total == num_bytes]
        numbers = np.memmap(f"{stem}.bin", dtype="<" + (kinds or _DTYPES[code])[0], mode="r")
    except (OSError, struct.error, ValueError) as error:
        raise ValueError(
            f"{path} is neither a .npy file nor a Megatron index (.idx beside .bin): {error}. "
            "zengine.data.DataAnalyzer writes .npy files"
        ) from None
    if int(sizes.sum()) != len(numbers):
        raise ValueError(f"{stem}.idx describes {int(sizes.sum())} numbers, but {stem}.bin has {len(numbers)}")
    return sizes, numbers
