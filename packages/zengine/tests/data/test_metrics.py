"""Samples sorted by difficulty, from memory and from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from zengine.data import MetricError, MetricIndex, length_of
from zengine.data.metrics import lengths_of


def test_an_index_answers_by_value_and_by_percentile() -> None:
    index = MetricIndex.of([5, 3, 9, 3])
    assert index.samples.tolist() == [1, 3, 0, 2]
    assert index.metrics.tolist() == [3, 3, 5, 9]
    assert [index.count_by_value(value) for value in (2, 3, 8, 9)] == [0, 2, 3, 4]
    assert [index.count_by_percentile(value) for value in (0, 49, 50, 100, 200)] == [0, 1, 2, 4, 4]
    assert index.count_by_percentile(3, of=4) == 3
    assert index.places().tolist() == [2, 0, 3, 1]


def test_files_give_the_index_that_was_saved(tmp_path: Path) -> None:
    index = MetricIndex.of([0.5, 0.25, 2.0])
    samples, metrics = tmp_path / "s.npy", tmp_path / "m.npy"
    np.save(samples, index.samples)
    np.save(metrics, index.metrics)
    loaded = MetricIndex.load(samples, metrics)
    assert (loaded.samples.tolist(), loaded.metrics.tolist()) == ([1, 0, 2], [0.25, 0.5, 2.0])
    assert isinstance(loaded.samples, np.memmap)
    assert MetricIndex.load(samples).metrics.tolist() == [0, 1, 2]


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", np.arange(3))
    np.save(tmp_path / "m.npy", np.arange(4))
    with pytest.raises(MetricError, match="both need one entry for each sample"):
        MetricIndex.load(tmp_path / "s.npy", tmp_path / "m.npy")
    with pytest.raises(MetricError, match=r"none\.npy cannot be read"):
        MetricIndex.load(tmp_path / "none.npy", tmp_path / "m.npy")
    with pytest.raises(MetricError, match="has 3 samples and the dataset 5"):
        MetricIndex.load(tmp_path / "s.npy").check_covers(5)
    with pytest.raises(MetricError, match="one finite number for each sample"):
        MetricIndex.of([1.0, float("nan")])


def test_the_length_of_a_sample_is_that_of_its_tokens() -> None:
    samples = [[1, 2, 3], torch.arange(4), {"input_ids": [1], "labels": [1, 2]}, ([1, 2], 0), "ab"]
    assert lengths_of(samples).tolist() == [3, 4, 1, 2, 2]
    with pytest.raises(MetricError, match="type int has no number of tokens"):
        length_of(3)
