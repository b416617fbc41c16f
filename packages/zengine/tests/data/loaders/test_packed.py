"""The loader of batches by tokens: shares of ranks, positions, counts."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from zengine.data import BatchFetcher, LoaderFactory, Packing, PickingOrder
from zengine.testing import check_resumes, take

LENGTHS = np.random.default_rng(1).integers(1, 12, 60)
DATA = [torch.full((int(length),), index) for index, length in enumerate(LENGTHS)]


def ids(samples):
    return [int(sample[0]) for sample in samples]


def loader_of(rank=0, world=1, accumulation=4, picking=PickingOrder.RANDOM, num_workers=0, max_tokens=24):
    fetcher = BatchFetcher(collate_fn=ids, num_workers=num_workers)
    factory = LoaderFactory(
        micro_batch_size=4, rank=rank, world_size=world, accumulation=accumulation, seed=7, fetcher=fetcher
    )
    return factory.packed(DATA, LENGTHS, Packing(max_tokens=max_tokens, picking=picking))


@pytest.mark.parametrize("picking", PickingOrder)
def test_ranks_read_what_one_reads_and_count_the_same_samples(picking):
    alone = loader_of(picking=picking)
    batches = take(alone, 40)
    ranks = [loader_of(rank, 2, 2, picking) for rank in range(2)]
    shared = [take(loader, 20) for loader in ranks]
    assert [batch for both in zip(*shared) for batch in both] == batches
    assert {loader.samples_handed for loader in (alone, *ranks)} == {sum(map(len, batches))}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stop", [0, 5, 16, 37])
def test_a_resumed_loader_yields_what_the_uninterrupted_one_would_have(stop, num_workers):
    check_resumes(loader_of, stop, 8, num_workers=num_workers)


def test_another_world_with_as_many_micro_batches_a_step_goes_on():
    killed, ahead = loader_of(picking=PickingOrder.SEQLEN), take(loader_of(picking=PickingOrder.SEQLEN), 12)
    take(killed, 4)
    ranks = [loader_of(rank, 4, 1, PickingOrder.SEQLEN) for rank in range(4)]
    for loader in ranks:
        loader.load_state_dict(killed.state_dict())
    assert [batch for each in zip(*(take(loader, 2) for loader in ranks)) for batch in each] == ahead[4:12]


def test_what_would_be_another_order_is_refused():
    state = loader_of(picking=PickingOrder.SEQLEN).state_dict()
    with pytest.raises(ValueError, match="this run has 3 per step on 1 ranks, which is another order"):
        loader_of(accumulation=3, picking=PickingOrder.SEQLEN).load_state_dict(state)
    with pytest.raises(ValueError, match="a dataset of 61 samples, this one has 60"):
        loader_of().load_state_dict({**state, "num_samples": 61})


def test_the_length_is_that_of_the_epoch_and_long_samples_are_told_of(caplog):
    with caplog.at_level(logging.WARNING, "zengine.data"):
        loader = loader_of(max_tokens=10)
    assert f"{int((LENGTHS > 10).sum())} of 60 samples exceed max_tokens = 10" in caplog.text
    for _ in range(2):
        assert len(loader) == len(list(loader))
    assert loader.epoch == loader.epochs_done() == 2
    next(iter(loader))
    assert loader.epochs_done() == 2 + 1 / len(loader)
