"""Dataset analysis: measures each sample once, in parallel, into files that a curriculum maps.

    analyzer = DataAnalyzer(dataset, {"seqlen": length_of}, "metrics", num_parts=8)
    analyzer.run(num_workers=4)                   # on one machine
    analyzer.map(part) ... analyzer.reduce()      # or: map each part on any host that sees the folder, reduce once

A metric is a function from a sample to a number.  `map` measures one part, a slice of the dataset; parts are
independent and can be repeated.  `reduce` joins the parts and sorts.  Results in `<folder>/<metric>/`:

    sample_to_metric.npy   the metric of sample i                      (dynamic batching: metrics_path is the folder)
    index_to_sample.npy    samples in order of difficulty              (curriculum: index_to_sample_path)
    index_to_metric.npy    the metric of each of those                 (curriculum: index_to_metric_path)

Files appear atomically: each is written to a temporary name and renamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import attrs
import numpy as np
from torch.utils.data import DataLoader, Dataset

from zengine.data.metrics import (
    METRIC_FILE,
    SAMPLE_FILE,
    SAMPLES_FILE,
    MetricError,
    MetricIndex,
    open_array,
    save_array,
)

Metric = Callable[[Any], float]


@final
@attrs.frozen(eq=False)
class DataAnalyzer:
    """Measures `dataset` by `metrics` into `folder`, in `num_parts` parts."""

    dataset: Any  # with __len__ and __getitem__
    metrics: Mapping[str, Metric]
    folder: str | Path
    num_parts: int = attrs.field(default=1, validator=attrs.validators.ge(1))

    def run(self, num_workers: int = 0) -> None:
        """Map all parts in `num_workers` processes (0: this process), at least one part each, and reduce."""
        shared = attrs.evolve(self, num_parts=max(self.num_parts, num_workers))
        parts: Any = DataLoader(_Parts(shared), batch_size=None, num_workers=num_workers)
        for _ in parts:
            pass
        shared.reduce()

    def map(self, part: int) -> None:
        """Measure the samples of one part.

        Raises:
            MetricError: a metric is not a finite number.
        """
        if not 0 <= part < self.num_parts:
            raise ValueError(f"part must be in 0..{self.num_parts - 1}, got {part}")
        begin, end = (len(self.dataset) * edge // self.num_parts for edge in (part, part + 1))
        measured: dict[str, list[float]] = {name: [] for name in self.metrics}
        for index in range(begin, end):
            sample = self.dataset[index]
            for name, metric in self.metrics.items():
                measured[name].append(_to_number(metric(sample), name, index))
        for name, values in measured.items():
            save_array(self._part_file(name, part), np.array(values, dtype=None if values else np.int64))

    def reduce(self) -> None:
        """Join the parts into the files of each metric, and delete the parts.

        Raises:
            MetricError: a part is missing, or belongs to another dataset.
        """
        for name in self.metrics:
            files = [self._part_file(name, part) for part in range(self.num_parts)]
            missing = [file.name for file in files if not file.exists()]
            if missing:
                raise MetricError(
                    f"metric {name!r}: {len(missing)} parts are missing, such as {missing[0]}; map them first"
                )
            values = np.concatenate([open_array(file) for file in files])
            if len(values) != len(self.dataset):
                raise MetricError(
                    f"metric {name!r}: the parts have {len(values)} samples and the dataset {len(self.dataset)}; map "
                    "all parts again"
                )
            order = MetricIndex.of(values, name)
            folder = Path(self.folder) / name
            save_array(folder / SAMPLE_FILE, values)
            save_array(folder / SAMPLES_FILE, order.samples)
            save_array(folder / METRIC_FILE, order.metrics)
            for file in files:
                file.unlink()

    def _part_file(self, name: str, part: int) -> Path:
        return Path(self.folder) / name / f"part-{part:05d}-of-{self.num_parts:05d}.npy"


class _Parts(Dataset[int]):
    """Parts as a dataset, so that a DataLoader's workers map them."""

    def __init__(self, analyzer: DataAnalyzer) -> None:
        self._analyzer = analyzer

    def __len__(self) -> int:
        return self._analyzer.num_parts

    def __getitem__(self, part: int) -> int:
        if part >= len(self):
            raise IndexError(part)
        self._analyzer.map(part)
        return part


def _to_number(value: Any, name: str, index: int) -> float:
    """Convert a metric to a Python number; integers stay integers."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not np.isfinite(number):
        raise MetricError(f"metric {name!r} of sample {index} must be a finite number, got {value!r}")
    return number
