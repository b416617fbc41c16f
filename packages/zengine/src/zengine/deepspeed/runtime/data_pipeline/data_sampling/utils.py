"""`deepspeed.runtime.data_pipeline.data_sampling.utils`: integer types, splits of index ranges, and file writers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from zengine.deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDatasetBuilder

__all__ = [
    "close_mmap_dataset_builder",
    "create_mmap_dataset_builder",
    "find_fit_int_dtype",
    "split_dataset",
    "split_index",
]

Bounds = list[tuple[int, int]]


def find_fit_int_dtype(min_value: float, max_value: float) -> type[np.integer[Any]]:
    """Return the smallest integer type of numpy that holds both values; unsigned unless `min_value` is negative."""
    unsigned: list[type[np.integer[Any]]] = [np.uint8, np.uint16, np.uint32, np.uint64]
    signed: list[type[np.integer[Any]]] = [np.int8, np.int16, np.int32, np.int64]
    kinds = unsigned if min_value >= 0 else signed
    fitting = (kind for kind in kinds if np.iinfo(kind).min <= min_value and max_value <= np.iinfo(kind).max)
    return next(fitting, kinds[-1])


def split_index(start_idx: int, end_idx: int, num_partitions: int) -> Bounds:
    """Return [begin, end) of `num_partitions` nearly equal parts of a range."""
    edges = np.linspace(start_idx, end_idx, num=num_partitions + 1, dtype=int).tolist()
    return list(pairwise(edges))


def split_dataset(dataset: Any, num_workers: int, worker_id: int, num_threads: int) -> tuple[Bounds, Bounds]:
    """Return the parts of all workers, and the parts of this worker's threads."""
    workers = split_index(0, len(dataset), num_workers)
    return workers, split_index(*workers[worker_id], num_threads)


def create_mmap_dataset_builder(fname: str, dtype: Any) -> MMapIndexedDatasetBuilder:
    """Open `fname`.bin for writing."""
    return MMapIndexedDatasetBuilder(f"{fname}.bin", dtype=dtype)


def close_mmap_dataset_builder(builder: MMapIndexedDatasetBuilder, fname: str) -> None:
    """End the document and write `fname`.idx."""
    builder.end_document()
    builder.finalize(f"{fname}.idx")
