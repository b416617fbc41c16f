"""Resuming a loader of an indexed dataset: bit-identical, at any batch, in any world."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zengine.data import BatchFetcher, DevicePrefetcher, LoaderFactory, make_loader
from zengine.data.order.uneven import UnevenStep
from zengine.testing import check_resumes, saved, take


def loader_of(samples=23, micro=3, *, rank=0, world=1, drop_last=True, **options):
    return make_loader(
        list(range(samples)),
        micro_batch_size=micro,
        rank=rank,
        world_size=world,
        seed=5,
        drop_last=drop_last,
        **options,
    )


@settings(max_examples=60, deadline=None)
@given(
    stop=st.integers(0, 30),
    samples=st.integers(12, 25),
    micro=st.integers(1, 4),
    world=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_a_resumed_loader_yields_what_the_uninterrupted_one_would_have(stop, samples, micro, world, drop_last):
    def make():
        return loader_of(samples, micro, rank=world - 1, world=world, drop_last=drop_last)

    check_resumes(make, stop, 15)


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_last_batch_of_an_epoch_moves_the_position_to_a_fresh_shuffle(drop_last):
    loader = loader_of(drop_last=drop_last)
    first = [batch.tolist() for batch in loader]
    assert (loader.epoch, loader.consumed_samples) == (1, 0)
    second = [batch.tolist() for batch in loader]
    assert loader.epoch == 2
    assert len(first) == len(second) == len(loader) == (7 if drop_last else 8)
    assert first != second


def test_epochs_are_counted_with_their_part():
    loader = loader_of(20, 5)
    assert [loader.epochs_done(), *(loader.epochs_done() for _ in zip(loader, range(5)))] == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_ranks_together_read_every_sample_once(world):
    loaders = [loader_of(24, 2, rank=rank, world=world) for rank in range(world)]
    samples = [sample for loader in loaders for batch in loader for sample in batch.tolist()]
    assert sorted(samples) == list(range(24))


def test_all_ranks_have_the_same_state_and_equally_many_batches_of_equal_size():
    loaders = [loader_of(23, 3, rank=rank, world=3, drop_last=False) for rank in range(3)]
    shapes = [[len(batch) for batch in loader] for loader in loaders]
    assert shapes == [[3, 3, 3]] * 3
    assert loaders[0].state_dict() == loaders[1].state_dict() == loaders[2].state_dict()


@pytest.mark.parametrize(("new_world", "new_micro"), [(1, 2), (2, 6), (4, 3), (3, 1)])
def test_another_world_resumes_at_the_same_global_sample(new_world, new_micro):
    old = [loader_of(48, 2, rank=rank, world=3) for rank in range(3)]
    steps = [list(islice(loader, 4)) for loader in old]
    seen = [sample for step in zip(*steps) for batch in step for sample in batch.tolist()]
    new = [loader_of(48, new_micro, rank=rank, world=new_world) for rank in range(new_world)]
    for loader in new:
        loader.load_state_dict(saved(old[0]))
    rest = [sample for step in zip(*new) for batch in step for sample in batch.tolist()]
    one = [sample for batch in loader_of(48, 1) for sample in batch.tolist()]
    assert seen + rest == one


def uneven(num_samples, rank, *, drop_last=True):
    factory = LoaderFactory(
        micro_batch_size=3, rank=rank, world_size=3, seed=5, drop_last=drop_last, uneven=(UnevenStep.within(8, 3, 2),)
    )
    return factory.plain(list(range(num_samples)))


@pytest.mark.parametrize(("drop_last", "num_steps"), [(True, 2), (False, 3)])
def test_uneven_shares_are_whole_steps_of_the_same_order(drop_last, num_steps):
    loaders = [uneven(20, rank, drop_last=drop_last) for rank in range(3)]
    micro_steps = list(zip(*loaders))
    assert len(micro_steps) == len(loaders[0]) == 2 * num_steps
    assert [[len(share) for share in shares] for shares in micro_steps[:2]] == [[1, 1, 2]] * 2
    seen = [sample for shares in micro_steps for share in shares for sample in share.tolist()]
    one = make_loader(
        list(range(20)), micro_batch_size=1, rank=0, world_size=1, seed=5, drop_last=True
    )  # the order of all
    order = [sample for batch in one for sample in batch.tolist()]
    assert seen == (order + order)[: 8 * num_steps]
    assert {(loader.epoch, loader.consumed_samples) for loader in loaders} == {(1, 0)}


def test_uneven_shares_go_on_within_a_step_and_begin_one_after_a_load():
    loader = uneven(24, 2)
    whole = [batch.tolist() for batch in uneven(24, 2)]
    halves = [batch.tolist() for batch in islice(loader, 3)]
    assert halves + [batch.tolist() for batch in loader] == whole
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "consumed_samples": 8})
    assert [batch.tolist() for batch in loader] == whole[2:]
    with pytest.raises(ValueError, match="7 samples, fewer than one step of 8 samples"):
        uneven(7, 0)


def test_a_rest_too_small_for_the_new_world_is_dropped_when_drop_last_says_so():
    old = loader_of(24, 2)
    take(old, 11)
    new = loader_of(24, 2, world=4)
    new.load_state_dict(saved(old))
    assert (new.epoch, new.consumed_samples) == (1, 0)
    padded = loader_of(24, 2, world=4, drop_last=False)
    padded.load_state_dict(saved(old))
    assert (padded.epoch, padded.consumed_samples) == (0, 22)
    assert len(list(padded)) == 1


def test_the_saved_seed_wins_over_a_new_one_because_the_position_belongs_to_it():
    old = loader_of()
    ahead = take(old, 3)
    new = make_loader(list(range(23)), micro_batch_size=3, rank=0, world_size=1, seed=99, drop_last=True)
    new.load_state_dict({**saved(old), "consumed_samples": 0})
    assert take(new, 3) == ahead


@pytest.mark.parametrize("num_ahead", [0, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_position_counts_what_was_handed_over_not_what_was_fetched_ahead(num_workers, num_ahead):
    prefetcher = DevicePrefetcher(device=torch.device("cpu"), num_ahead=num_ahead)
    factory = LoaderFactory(
        micro_batch_size=3, seed=5, fetcher=BatchFetcher(num_workers=num_workers, prefetcher=prefetcher)
    )
    loader, plain = factory.plain(list(range(23))), take(loader_of(drop_last=False), 5)
    batches = iter(loader)
    for count in range(3):
        assert next(batches).tolist() == plain[count]
        assert loader.consumed_samples == 3 * (count + 1)
    resumed = factory.plain(list(range(23)))
    resumed.load_state_dict(saved(loader))
    assert take(resumed, 2) == plain[3:]


def test_iterating_draws_nothing_from_any_global_generator():
    def states():
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    loader = loader_of(micro=8)
    before = states()
    take(loader, 5)
    take(loader_of(micro=8, num_workers=1), 3)
    assert states() == before


def test_another_dataset_is_refused_with_both_sizes():
    with pytest.raises(ValueError, match="saved in a dataset of 23 samples, this one has 24"):
        loader_of(24).load_state_dict(loader_of(23).state_dict())


def test_another_setting_of_shuffle_is_refused():
    with pytest.raises(ValueError, match="saved with shuffle=True, this loader has shuffle=False"):
        loader_of(shuffle=False).load_state_dict(loader_of().state_dict())


def test_a_position_beyond_the_epoch_is_refused():
    loader = loader_of()
    with pytest.raises(ValueError, match="consumed_samples is 23, which is not below the 23 samples"):
        loader.load_state_dict({**loader.state_dict(), "consumed_samples": 23})


def test_a_refused_state_leaves_the_iteration_alive():
    loader = loader_of()
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match=r"num_samples is missing; the state has seed.* another kind of loader"):
        loader.load_state_dict({"seed": 1, "epoch": 0, "consumed_samples": 0})
    next(batches)
    assert loader.consumed_samples == 6
