"""Measuring a dataset into files: by parts, by workers, and into the curriculum that reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zengine.data import DataAnalyzer, MetricError, MetricIndex, length_of

DATA = [list(range(length)) for length in (3, 1, 2, 5, 4, 2, 9)]
METRICS = {"seqlen": length_of, "last": lambda sample: sample[-1] / 2}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_measures_every_sample_and_sorts(tmp_path: Path, num_workers: int) -> None:
    DataAnalyzer(DATA, METRICS, tmp_path, num_parts=3 - num_workers).run(num_workers=num_workers)
    home = tmp_path / "seqlen"
    assert np.load(home / "sample_to_metric.npy").tolist() == [3, 1, 2, 5, 4, 2, 9]
    index = MetricIndex.load(home / "index_to_sample.npy", home / "index_to_metric.npy")
    assert index.samples.tolist() == [1, 2, 5, 0, 4, 3, 6]
    assert index.metrics.dtype.kind == "i"
    assert np.load(tmp_path / "last" / "index_to_metric.npy").tolist() == [0, 0.5, 0.5, 1, 1.5, 2, 4]
    assert {path.name for path in home.iterdir()} == {
        "sample_to_metric.npy",
        "index_to_sample.npy",
        "index_to_metric.npy",
    }


def test_parts_are_mapped_anywhere_and_reduced_when_all_are_there(tmp_path: Path) -> None:
    analyzer = DataAnalyzer(DATA, {"seqlen": length_of}, tmp_path, num_parts=10)
    for part in range(9):
        analyzer.map(part)
    with pytest.raises(MetricError, match=r"1 parts are missing, such as part-00009-of-00010\.npy"):
        analyzer.reduce()
    analyzer.map(9)
    longer = DataAnalyzer([*DATA, [1]], {"seqlen": length_of}, tmp_path, num_parts=10)
    with pytest.raises(MetricError, match="the parts have 7 samples and the dataset 8"):
        longer.reduce()
    analyzer.reduce()
    assert np.load(tmp_path / "seqlen" / "sample_to_metric.npy").tolist() == [3, 1, 2, 5, 4, 2, 9]


@pytest.mark.parametrize("value", ["3", None, float("nan"), True])
def test_a_metric_is_a_number(tmp_path: Path, value: object) -> None:
    with pytest.raises(MetricError, match="metric 'm' of sample 0 must be a finite number"):
        DataAnalyzer(DATA, {"m": lambda _: value}, tmp_path).run()


def test_a_part_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"part must be in 0\.\.1, got 2"):
        DataAnalyzer(DATA, METRICS, tmp_path, num_parts=2).map(2)
