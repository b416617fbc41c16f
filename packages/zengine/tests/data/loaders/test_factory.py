"""Loader factory; each loader has tests of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from zengine.data import FixedDiscrete, Limit, LoaderFactory, MetricError, MetricIndex, Packing, StreamLoader
from zengine.data.loaders.factory import is_indexed, make_fetcher
from zengine.data.order.curriculum import DifficultyType

FACTORY = LoaderFactory(micro_batch_size=2)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(4)


def test_each_kind_of_data_gets_its_loader():
    assert isinstance(FACTORY.plain(Stream()), StreamLoader)
    assert [batch.tolist() for batch in FACTORY.plain([1, 2, 3, 4], shuffle=False)] == [[1, 2], [3, 4]]


def test_what_does_not_belong_together_is_refused():
    limit = Limit.make(FixedDiscrete(difficulties=(1,), until=()), DifficultyType.VALUE, MetricIndex.of([1, 2, 3]))
    with pytest.raises(MetricError, match="3 samples and the dataset 4"):
        FACTORY.curriculum([1, 2, 3, 4], (limit,))
    with pytest.raises(MetricError, match=r"lengths has shape \(3,\); a dataset of 4 samples needs \(4,\)"):
        FACTORY.packed([1, 2, 3, 4], np.ones(3, dtype=np.int64), Packing(max_tokens=4))
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.0"):
        LoaderFactory(micro_batch_size=1, rank=1)
    with pytest.raises(TypeError, match="of a dict of splits, pass one split"):
        FACTORY.plain({"train": [1]})


def test_only_sequences_are_indexed():
    assert is_indexed([1])
    assert not any(map(is_indexed, ({"a": 1}, "text", iter([1]), Stream(), None)))


def test_batches_for_a_gpu_are_pinned_unless_they_stay():
    options = {"collate_fn": None, "num_workers": 0, "pin_memory": False}
    assert make_fetcher(**options, device=torch.device("cuda"), prefetch=1).pin_memory
    assert not make_fetcher(**options, device=torch.device("cuda"), prefetch=0).pin_memory
    assert not make_fetcher(**options, device=torch.device("cpu"), prefetch=1).pin_memory
