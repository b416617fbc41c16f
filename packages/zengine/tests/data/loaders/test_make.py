"""What may be training data, and which loader it gets."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from zengine.data import Loader, MapLoader, StreamLoader, make_loader


def make(dataset, **options):
    return make_loader(
        dataset, **{"micro_batch_size": 2, "rank": 0, "world_size": 1, "seed": 0, "drop_last": True, **options}
    )


@pytest.mark.parametrize("dataset", [[1, 2, 3], (1, 2), torch.arange(4), TensorDataset(torch.arange(4)), range(5)])
def test_anything_with_a_length_and_an_index_is_a_dataset(dataset):
    loader = make(dataset)
    assert isinstance(loader, MapLoader)
    assert isinstance(loader, Loader)
    assert loader.dataset is dataset
    assert loader.batch_size == 2
    assert len(list(loader)) == len(loader)


def test_an_iterable_dataset_gets_a_stream_loader():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    assert isinstance(make(Stream()), StreamLoader)


@pytest.mark.parametrize("thing", [3, None, iter([1, 2]), {"train": [1]}, "text", DataLoader([1, 2])])
def test_anything_else_is_refused_by_type_with_what_is_accepted(thing):
    with pytest.raises(TypeError, match=rf"must be a torch Dataset or a sequence.*got {type(thing).__name__}"):
        make(thing)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank must be in 0..1 \(world_size is 2\), got {rank}"):
        make([1, 2, 3, 4], rank=rank, world_size=2)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_dataset_below_one_micro_batch_of_all_ranks_is_refused(drop_last):
    with pytest.raises(ValueError, match="has 3 samples, fewer than one micro-batch of all ranks"):
        make([1, 2, 3], world_size=2, drop_last=drop_last)
