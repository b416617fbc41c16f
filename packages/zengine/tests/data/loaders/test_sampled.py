"""The loader of a sampler that the caller brings."""

from __future__ import annotations

import pytest
from torch.utils.data import DistributedSampler, SequentialSampler

from zengine.data import BatchFetcher, LoaderFactory
from zengine.testing import check_resumes, take

DATA = list(range(21))


def loader_of(rank=0, world=2, micro=3, num_workers=0, drop_last=True, sampler=None):
    sampler = sampler or DistributedSampler(DATA, num_replicas=world, rank=rank, seed=3)
    fetcher = BatchFetcher(num_workers=num_workers)
    factory = LoaderFactory(
        micro_batch_size=micro, rank=rank, world_size=world, seed=3, drop_last=drop_last, fetcher=fetcher
    )
    return factory.sampled(DATA, sampler)


def test_epochs_of_a_distributed_sampler_differ_because_it_is_told_their_number():
    loader = loader_of()
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    expected = DistributedSampler(DATA, num_replicas=2, rank=0, seed=3)
    expected.set_epoch(1)
    assert [sample for batch in second for sample in batch] == list(expected)[:9]
    assert first != second
    assert len(loader) == len(first) == 3
    assert len(loader_of(drop_last=False)) == 4


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stop", [0, 2, 3, 7])
def test_a_position_is_a_number_of_samples(stop, num_workers):
    check_resumes(loader_of, stop, 4, num_workers=num_workers)


class Counting:
    """A sampler that keeps its own position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield (self.at - 1) % len(DATA)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_sampler_with_a_position_keeps_it():
    killed = loader_of(world=1, sampler=Counting())
    assert take(killed, 2) == [[0, 1, 2], [3, 4, 5]]
    resumed = loader_of(world=1, sampler=Counting())
    resumed.load_state_dict(killed.state_dict())
    assert take(resumed, 1) == [[6, 7, 8]]


def test_the_last_batch_may_be_short():
    loader = loader_of(world=1, micro=8, drop_last=False, sampler=SequentialSampler(DATA))
    assert [(len(batch), round(loader.epochs_done(), 3)) for batch in loader] == [(8, 0.333), (8, 0.667), (5, 1.0)]
    assert loader.epoch == loader.epochs_done() == 1
    assert loader_of(world=1, sampler=Counting()).epochs_done() == 0
