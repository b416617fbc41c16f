"""Batches made in this process or in workers are the same, random draws in workers included."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from zengine.data import forever, make_loader


class Augmented(Dataset):
    """Adds one draw from each global generator to the sample."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


def loader_of(dataset, **options):
    return make_loader(
        dataset, **{"micro_batch_size": 2, "rank": 0, "world_size": 1, "seed": 3, "drop_last": True, **options}
    )


def take(loader, count):
    return [tuple(column.tolist() for column in batch) for batch in islice(forever(loader), count)]


def test_random_draws_in_workers_depend_neither_on_their_number_nor_on_an_interruption():
    whole = take(loader_of(Augmented(), num_workers=1), 8)
    killed = loader_of(Augmented(), num_workers=2)
    assert take(killed, 3) == whole[:3]
    resumed = loader_of(Augmented(), num_workers=2)
    resumed.load_state_dict(killed.state_dict())
    assert take(resumed, 5) == whole[3:]
    draws = [draw for _indices, *columns in whole for column in columns for draw in column]
    assert len(set(draws)) == len(draws)


def test_ranks_draw_differently_in_workers():
    first, second = (take(loader_of(Augmented(), num_workers=1, rank=rank, world_size=2), 2) for rank in range(2))
    assert not {draw for batch in first for draw in batch[1]} & {draw for batch in second for draw in batch[1]}


def test_default_collation_stacks_tensors():
    features, labels = next(iter(loader_of(TensorDataset(torch.randn(6, 4), torch.arange(6)))))
    assert features.shape == (2, 4)
    assert labels.dtype == torch.int64


def test_collate_fn_makes_the_batch():
    batch = next(iter(loader_of(["a", "bb", "ccc"], collate_fn="+".join, shuffle=False)))
    assert batch == "a+bb"


def test_a_dataset_that_reads_many_samples_at_once_is_asked_once_a_batch():
    class Many(list):
        def __getitems__(self, indices):
            asked.append(indices)
            return [self[index] for index in indices]

    asked = []
    next(iter(loader_of(Many(range(6)), shuffle=False)))
    assert asked == [[0, 1]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for pinned memory where there is none")
def test_pinning_is_left_out_where_there_is_no_cuda_device(recwarn):
    batch = next(iter(loader_of(torch.arange(6), pin_memory=True)))
    assert not batch.is_pinned()
    assert not recwarn.list


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_pinned_on_cuda():
    assert next(iter(loader_of(torch.arange(6), pin_memory=True))).is_pinned()
