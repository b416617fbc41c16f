"""Difficulty index: samples sorted by a metric, which a curriculum cuts.

    index = MetricIndex.of([5, 3, 9])          # from one number per sample, in memory
    index = MetricIndex.load(samples, metrics) # from files, memory-mapped
    index.count_by_value(5)                    # 2: samples with a metric of at most 5
    index.places()                             # (3,): the rank of each sample in the order of difficulty

An index is two arrays of equal length: the samples by difficulty, ties by sample, and their metrics.  Every query of
a curriculum is "the first k of them": a sample is admitted if its place is below k.  On disk they are two .npy files
written by `DataAnalyzer`; Megatron's index files (.idx beside .bin) of DeepSpeed's analyzer are read too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from zengine.data.files import megatron_index
from zengine.data.files.arrays import mapped_array

SAMPLE_FILE = "sample_to_metric.npy"
SAMPLES_FILE = "index_to_sample.npy"
METRIC_FILE = "index_to_metric.npy"


class MetricError(ValueError):
    """A metric does not match the data, or its files do not match each other."""


@attrs.frozen(kw_only=True, eq=False)
class MetricIndex:
    """Samples by difficulty.  Invariant: `samples` is a permutation and `metrics` does not decrease."""

    name: str
    samples: NDArray[Any]  # (num_samples,) integers: samples in order of difficulty
    metrics: NDArray[Any]  # (num_samples,) numbers: the metric of each of them

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[Any], name: str = "metric") -> MetricIndex:
        """Build the index from the metric of each sample."""
        array = np.asarray(values)
        if array.ndim != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise MetricError(
                f"metric {name!r} needs one finite number for each sample, got {array.dtype} of shape {array.shape}"
            )
        samples = np.argsort(array, kind="stable")
        return cls(name=name, samples=samples, metrics=array[samples])

    @classmethod
    def load(cls, samples: str | Path, metrics: str | Path = "", name: str = "metric") -> MetricIndex:
        """Load files: .npy, or Megatron pairs (given with or without .idx).

        Without `metrics` only the order is known, which is enough for percentiles; the metric is then the place.

        Raises:
            MetricError: a file is missing, or they do not match each other.
        """
        if str(samples).endswith(".npy"):
            order = _mapped(samples, name)
            index = cls(
                name=name, samples=order, metrics=_mapped(metrics, name) if metrics else np.arange(len(order))
            )
        elif metrics:
            index = cls(name=name, **megatron_index.read_pair(samples, metrics))
        else:
            order = megatron_index.read_order(samples)
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
                f"metric {self.name!r} has {len(self.samples)} samples and the dataset {num_samples}: analyze this "
                "dataset, in the order that it is trained in"
            )

    def count_by_value(self, value: float) -> int:
        """Count the samples with a metric of at most `value`."""
        return int(np.searchsorted(self.metrics, value, side="right"))

    def count_by_percentile(self, percentile: int, of: int = 100) -> int:
        """Count the samples among the easiest `percentile` of `of` parts."""
        return len(self.samples) * min(percentile, of) // of

    def places(self) -> NDArray[np.int64]:
        """Return (num_samples,) int64: the place of each sample in the order of difficulty."""
        places = np.empty(len(self.samples), dtype=np.int64)
        places[self.samples] = np.arange(len(self.samples))
        return places


def _mapped(path: str | Path, name: str) -> NDArray[Any]:
    try:
        return mapped_array(path)
    except (OSError, ValueError) as error:
        raise MetricError(
            f"metric {name!r}: {path} cannot be read ({error}); DataAnalyzer(...).run() writes {SAMPLES_FILE} and "
            f"{METRIC_FILE} for each metric"
        ) from None


def lengths_of(dataset: Any) -> NDArray[np.int64]:
    """Return (num_samples,) int64: the tokens of each sample, reading all of them once.

    A sample is a mapping with "input_ids", a tuple that begins with the tokens, or the tokens.
    """
    return np.fromiter((length_of(dataset[i]) for i in range(len(dataset))), dtype=np.int64, count=len(dataset))


def length_of(sample: Any) -> int:
    """Return the number of tokens of one sample.

    Raises:
        MetricError: it has no length.
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
            f"a sample of type {type(sample).__name__} has no number of tokens: give the lengths as a metric of "
            "your own (zengine.data.DataAnalyzer writes one)"
        ) from None
