"""`deepspeed.runtime.data_pipeline.data_sampling.data_analyzer`: metrics of a dataset, from functions of batches.

    analyzer = DataAnalyzer(dataset, batch_size=64, metric_names=["seqlen"], metric_functions=[lengths],
                            metric_types=["single_value_per_sample"], metric_dtypes=[np.int64], save_path="metrics")
    analyzer.run_map_reduce()

A function takes a collated batch and returns a tensor or an array.  Of type "single_value_per_sample" it has one
integer for each sample, and `<save_path>/<name>/` gets these indexed datasets (`indexed_dataset`):

    <name>_sample_to_metric                  entry i: the value of sample i
    <name>_index_to_metric                   the distinct values, ascending
    <name>_index_to_sample                   the samples of each of them
    <name>_index_to_sample_percentile_merged the samples, in at most about 100 groups of ascending values

Of type "accumulate_value_over_samples" results of all batches are summed, into `<name>_metric_value`.

`run_map` measures one worker's part into a .npy file and `run_reduce` joins the parts.  Rejected: DeepSpeed's lists
of samples in one .csv for each value.  `zengine.data.DataAnalyzer` takes functions of one sample instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Subset

from zengine.data.metrics import open_array, save_array
from zengine.deepspeed.comm import barrier
from zengine.deepspeed.comm.world import get_rank, get_world_size, init_distributed, is_initialized
from zengine.deepspeed.runtime.data_pipeline.data_sampling.utils import (
    close_mmap_dataset_builder,
    create_mmap_dataset_builder,
    find_fit_int_dtype,
    split_dataset,
)

__all__ = ["DataAnalyzer", "DistributedDataAnalyzer"]

SINGLE, ACCUMULATE = "single_value_per_sample", "accumulate_value_over_samples"
Values = NDArray[Any]


@attrs.define(eq=False)
class DataAnalyzer:
    """Measures a dataset in `num_workers` parts, each by `num_threads` processes; see the module."""

    dataset: Any  # with __len__ and __getitem__
    num_workers: int = 1
    worker_id: int = 0
    num_threads: int = 1  # processes of a worker
    num_threads_reduce: int = 1  # ignored: joining is fast
    specific_threads: Sequence[int] = ()  # map only these parts of the worker
    batch_size: int = 1
    metric_names: Sequence[str] = ()
    metric_functions: Sequence[Callable[[Any], Any]] = ()
    metric_types: Sequence[str] = ()
    metric_dtypes: Sequence[Any] = ()  # checked against the results; empty: any
    save_path: str | Path = "./"
    collate_fn: Callable[[list[Any]], Any] | None = None
    custom_map_init: Callable[..., Any] | None = None  # replace the three steps of a map and the reduce
    custom_map_update: Callable[..., Any] | None = None
    custom_map_finalize: Callable[..., Any] | None = None
    custom_reduce: Callable[..., Any] | None = None
    sample_indices: Any = None  # number of each sample, if the dataset is a shuffled one

    def __attrs_post_init__(self) -> None:
        """Raise ValueError for an unknown type of metric, or lists of different lengths."""
        if unknown := set(self.metric_types) - {SINGLE, ACCUMULATE}:
            raise ValueError(f"metric_types has {sorted(unknown)}; allowed are {SINGLE} and {ACCUMULATE}")
        counts = {len(each) for each in (self.metric_names, self.metric_functions, self.metric_types)}
        if len(counts) > 1:
            raise ValueError("metric_names, metric_functions and metric_types must have equally many members")

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Map this worker's part; when all ranks of `comm_group` have done so, worker 0 reduces.  A collective."""
        self.run_map()
        _wait(comm_group, self.num_workers)
        if self.worker_id == 0:
            self.run_reduce()
        _wait(comm_group, self.num_workers)

    def run_map(self) -> None:
        """Measure this worker's part.  Raises RuntimeError if one of several processes fails."""
        threads = list(self.specific_threads) or list(range(self.num_threads))
        if self.num_threads == 1:
            self.run_map_helper(0)
            return
        processes = [get_context("fork").Process(target=self.run_map_helper, args=(thread,)) for thread in threads]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        failed = [thread for thread, process in zip(threads, processes) if process.exitcode]
        if failed:
            raise RuntimeError(f"worker {self.worker_id}: threads {failed} failed; see their tracebacks above")

    def run_map_helper(self, thread_id: int) -> None:
        """Measure the part of one thread.

        Raises:
            TypeError: a function returns neither a tensor nor an array, or another dtype than metric_dtypes.
        """
        begin, end = self._part(thread_id)
        batches = DataLoader(Subset(self.dataset, range(begin, end)), self.batch_size, collate_fn=self.collate_fn)
        arguments = (self.metric_names, self.metric_types, self.metric_dtypes, str(self.save_path), self.worker_id)
        make, update = self.custom_map_init, self.custom_map_update
        results = [_Results() for _ in self.metric_names] if make is None else make(thread_id, *arguments)
        for number, batch in enumerate(batches):
            at = begin + number * self.batch_size
            if update is None:
                self._update(results, batch, at)
            else:
                update(batch, self.metric_types, self.metric_dtypes, self.metric_functions, results, at)
        if self.custom_map_finalize is not None:
            self.custom_map_finalize(self.metric_types, self.metric_dtypes, results)
            return
        for name, result in zip(self.metric_names, results):
            save_array(self._part_file(name, self.worker_id, thread_id), result.array())

    def run_reduce(self) -> None:
        """Join the parts of all workers, and write the files of each metric.

        Raises:
            FileNotFoundError: a part is missing.
            ValueError: the parts do not cover the dataset.
        """
        if self.custom_reduce is not None:
            counts = (self.num_workers, self.num_threads, self.num_threads_reduce)
            self.custom_reduce(self.dataset, self.metric_names, self.metric_types, str(self.save_path), *counts)
            return
        places = [(worker, thread) for worker in range(self.num_workers) for thread in range(self.num_threads)]
        for name, kind in zip(self.metric_names, self.metric_types):
            files = [self._part_file(name, *place) for place in places]
            parts = [np.array(open_array(file)) for file in files]
            stem = str(Path(self.save_path) / name / name)
            if kind == SINGLE:
                values, samples = np.concatenate(parts, axis=1)
                if len(values) != len(self.dataset):
                    raise ValueError(
                        f"metric {name!r}: the parts have {len(values)} values and the dataset {len(self.dataset)} "
                        "samples; map all parts again"
                    )
                write_values(stem, values, samples)
            else:
                write_dataset(f"{stem}_metric_value", [np.sum([part for part in parts if part.size], axis=0)])
            for file in files:
                file.unlink()

    def _part(self, thread_id: int) -> tuple[int, int]:
        _, threads = split_dataset(self.dataset, self.num_workers, self.worker_id, self.num_threads)
        return threads[thread_id]

    def _part_file(self, name: str, worker: int, thread: int) -> Path:
        return Path(self.save_path) / name / f"worker{worker}_thread{thread}.npy"

    def _update(self, results: list[_Results], batch: Any, begin: int) -> None:
        dtypes = self.metric_dtypes or [None] * len(results)
        for result, name, function, kind, dtype in zip(
            results, self.metric_names, self.metric_functions, self.metric_types, dtypes
        ):
            values = function(batch)
            if not isinstance(values, (torch.Tensor, np.ndarray)):
                raise TypeError(f"metric {name!r} returned a {type(values).__name__}, not a tensor or an array")
            if dtype is not None and values.dtype != dtype:
                raise TypeError(f"metric {name!r} has dtype {values.dtype}, but metric_dtypes says {dtype}")
            array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
            if kind == SINGLE:
                result.append(array.reshape(-1), self._numbers(batch, begin, len(array)))
            else:
                result.total = array.copy() if result.total is None else result.total + array

    def _numbers(self, batch: Any, begin: int, count: int) -> Values:
        """Return the numbers of the samples of a batch: its "index", `sample_indices`, or the dataset's order."""
        if isinstance(batch, dict) and "index" in batch:
            return np.array([int(row[0]) for row in batch["index"]], dtype=np.int64)
        numbers = np.arange(begin, begin + count)
        return numbers if self.sample_indices is None else np.asarray(self.sample_indices)[numbers]


@attrs.define(eq=False)
class DistributedDataAnalyzer:
    """The same on all ranks of a group, each of which measures one part; rank 0 writes."""

    dataset: Any
    num_workers: int = 1  # without comm_group: this many ranks, of which this one is `worker_id`
    num_threads: int = 1
    worker_id: int = 0
    batch_size: int = 1
    metric_names: Sequence[str] = ()
    metric_functions: Sequence[Callable[[Any], Any]] = ()
    metric_types: Sequence[str] = ()
    save_path: str | Path = "./"
    collate_fn: Callable[[list[Any]], Any] | None = None
    device: Any = "cuda"  # ignored: values go through files
    comm_group: Any = None
    sample_indices: Any = None

    def run_map_reduce(self) -> None:
        """Measure and write.  A collective; all ranks must see `save_path`."""
        if self.num_workers > 1:
            init_distributed()  # rank 0 reads what the others write
        if self.comm_group is not None:
            self.num_workers, self.worker_id = get_world_size(self.comm_group), get_rank(self.comm_group)
        names = [each.name for each in attrs.fields(type(self)) if each.name not in ("device", "comm_group")]
        DataAnalyzer(**{name: getattr(self, name) for name in names}).run_map_reduce(self.comm_group)


@attrs.define(eq=False)
class _Results:
    """Results of one metric in one part."""

    values: list[Values] = attrs.field(factory=list)
    samples: list[Values] = attrs.field(factory=list)
    total: Any = None  # array, or None before the first batch

    def append(self, values: Values, samples: Values) -> None:
        self.values.append(values)
        self.samples.append(samples)

    def array(self) -> Values:
        """Return what a part's file holds: the sum, flat; or (2, samples) values and numbers."""
        if self.total is not None:
            return np.asarray(self.total.reshape(-1))
        empty = np.empty(0, dtype=np.int64)
        return np.stack([np.concatenate([empty, *self.values]), np.concatenate([empty, *self.samples])])


def write_values(stem: str, values: Values, samples: Values) -> None:
    """Write the datasets of one value for each sample.  values, samples: (n,), value and number of each sample."""
    write_dataset(f"{stem}_sample_to_metric", values[:, None])
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    groups = np.split(samples[order], starts[1:])
    number_type = find_fit_int_dtype(0, len(values) - 1)
    write_dataset(f"{stem}_index_to_metric", distinct[:, None])
    write_dataset(f"{stem}_index_to_sample", groups, number_type)
    step = max(1, len(groups) // 100)
    merged = [np.concatenate(groups[at : at + step]) for at in range(0, len(groups), step)]
    write_dataset(f"{stem}_index_to_sample_percentile_merged", merged, number_type)


def write_dataset(fname: str, entries: Sequence[Values] | Values, dtype: Any = None) -> None:
    """Write an indexed dataset in `dtype`, or in the smallest integer type that holds all numbers."""
    if dtype is None:
        dtype = find_fit_int_dtype(min(each.min() for each in entries), max(each.max() for each in entries))
    builder = create_mmap_dataset_builder(fname, dtype)
    builder.add_items(entries)
    close_mmap_dataset_builder(builder, fname)


def _wait(group: Any, num_workers: int) -> None:
    """Wait for the other workers.  Raises RuntimeError if they have no process group."""
    if is_initialized():
        barrier(group)
    elif num_workers > 1:
        raise RuntimeError(
            f"{num_workers} workers must wait for each other: call deepspeed.init_distributed() first, or run_map() "
            "in each and then run_reduce() in one"
        )
