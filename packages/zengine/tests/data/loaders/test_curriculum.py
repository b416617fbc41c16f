"""The loader of a curriculum: shares of ranks, positions, workers, post-processing."""

from __future__ import annotations

import pytest

from zengine.data import (
    BatchFetcher,
    Custom,
    DifficultyType,
    FixedDiscrete,
    FixedRoot,
    Limit,
    LoaderFactory,
    MetricIndex,
)
from zengine.testing import check_resumes, saved, take

DATA = list(range(40))
METRIC = [(7 * sample) % 40 for sample in DATA]


def loader_of(rank=0, world=1, micro=4, accumulation=2, law=None, num_workers=0, num_epochs=3, **options):
    law = law or FixedRoot(low=10, high=40, steps=8)
    limits = (Limit.make(law, DifficultyType.VALUE, MetricIndex.of(METRIC, "seqlen")),)
    factory = LoaderFactory(
        micro_batch_size=micro,
        rank=rank,
        world_size=world,
        accumulation=accumulation,
        seed=7,
        fetcher=BatchFetcher(num_workers=num_workers),
    )
    return factory.curriculum(DATA, limits, num_epochs=num_epochs, **options)


def test_ranks_share_the_batches_of_one():
    alone = take(loader_of(), 12)
    ranks = [take(loader_of(rank, 2, micro=2), 12) for rank in range(2)]
    assert [left + right for left, right in zip(*ranks)] == alone


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stop", [0, 3, 11, 31])
def test_a_resumed_loader_yields_what_the_uninterrupted_one_would_have(stop, num_workers):
    check_resumes(loader_of, stop, 8, num_workers=num_workers)


def test_another_world_goes_on_at_the_same_sample():
    killed = loader_of()
    ahead = take(loader_of(), 12)
    take(killed, 6)
    ranks = [loader_of(rank, 4, micro=1) for rank in range(4)]
    for loader in ranks:
        loader.load_state_dict(saved(killed))
    assert [[*a, *b, *c, *d] for a, b, c, d in zip(*(take(loader, 6) for loader in ranks))] == ahead[6:]


def test_an_iteration_goes_on_for_the_epochs_it_was_given():
    loader = loader_of(num_epochs=2)
    assert len(loader) == len(list(loader)) == 20
    assert loader.consumed_samples == 0
    assert loader.epoch >= 2
    assert len(list(loader)) == 20


def test_epochs_are_counted_by_the_walk():
    """A quarter is admitted for ever, so 10 samples are about a whole pass."""
    loader = loader_of(law=FixedDiscrete(difficulties=(9,), until=()), micro=5)
    take(loader, 4)
    assert 1 < loader.epochs_done() <= 2
    assert loader.state_dict()["consumed_samples"] == 20


def test_a_post_processing_function_sees_the_difficulty_of_its_batch():
    loader = loader_of(law=FixedDiscrete(difficulties=(10, 20, 39), until=(1, 2)))
    seen = []
    loader.post_process = lambda batch, state: (seen.append(state["current_difficulties"]), batch * 0)[1]
    assert sum(sum(batch) for batch in take(loader, 5)) == 0
    assert [state["seqlen"] for state in seen] == [10, 10, 20, 20, 39]
    assert loader.state_dict()["curriculum_step"] == 3


def test_a_custom_schedule_is_the_caller_s():
    loader = loader_of(law=Custom(low=1, high=39))
    with pytest.raises(RuntimeError, match="set_custom_curriculum_learning_schedule"):
        next(iter(loader))
    loader.set_custom_schedule({"seqlen": lambda step: 10 * step})
    assert all(METRIC[sample] <= 10 for batch in take(loader, 2) for sample in batch)


def test_the_steps_of_a_loader_can_become_longer():
    loader = loader_of(law=FixedDiscrete(difficulties=(10, 20, 39), until=(1, 2)))
    seen = []
    loader.post_process = lambda batch, state: (seen.append(state["current_difficulties"]["seqlen"]), batch)[1]
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    loader.set_accumulation(3)
    for _ in range(4):
        next(batches)
    assert seen == [10, 10, 20, 20, 20, 39]


def test_another_dataset_is_refused():
    state = {**loader_of().state_dict(), "num_samples": 41}
    with pytest.raises(ValueError, match="a dataset of 41 samples, this one has 40"):
        loader_of().load_state_dict(state)


@pytest.mark.parametrize("name", ["seed", "epoch", "place", "step", "micro_step", "consumed_samples", "num_samples"])
@pytest.mark.parametrize("junk", [None, "x", -7, 1.5, [], {}, True, 10**30], ids=str)
def test_a_number_that_cannot_be_is_refused_by_name_and_nothing_has_moved(name, junk):
    loader = loader_of()
    take(loader, 3)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=f"loader state: {name} "):
        loader.prepare_load({**before, name: junk})
    with pytest.raises(ValueError, match="loader state: place is 40, which is not below the 40 samples of a pass"):
        loader.prepare_load({**before, "place": 40})
    loader.prepare_load({**before, "epoch": 5})
    assert loader.state_dict() == before
