"""Iterable datasets pass through; they have a position only if they know it."""

import json
import logging
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from zengine.data import make_loader


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Remembering(IterableDataset):
    """Knows its position."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 10:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Sized(Stream):
    def __len__(self):
        return 10


def loader_of(dataset, **options):
    return make_loader(
        dataset, **{"micro_batch_size": 4, "rank": 0, "world_size": 2, "seed": 0, "drop_last": False, **options}
    )


def test_the_stream_is_batched_in_its_own_order():
    assert [batch.tolist() for batch in loader_of(Stream())] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(batch) for batch in loader_of(Stream(), drop_last=True)] == [4, 4]


def test_epochs_and_samples_of_all_ranks_are_counted():
    loader = loader_of(Stream())
    next(iter(loader))
    assert (loader.epoch, loader.consumed_samples) == (0, 8)
    next(iter(loader))  # without a position of its own the stream starts anew
    assert (loader.epoch, loader.consumed_samples) == (0, 8)
    list(loader)
    assert (loader.epoch, loader.consumed_samples) == (1, 0)


def test_a_dataset_that_knows_its_position_resumes_at_the_next_batch():
    killed = loader_of(Remembering())
    next(iter(killed))
    resumed = loader_of(Remembering())
    resumed.load_state_dict(json.loads(json.dumps(killed.state_dict())))
    assert resumed.consumed_samples == 8
    assert [batch.tolist() for batch in resumed] == [[4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("options", [{"dataset": Stream()}, {"dataset": Remembering(), "num_workers": 1}])
def test_a_stream_without_position_is_read_again_up_to_it_and_that_is_said(options, caplog):
    with caplog.at_level(logging.WARNING, logger="zengine.data"):
        loader = loader_of(**options)
        loader.load_state_dict({"epoch": 2, "consumed_samples": 8, "dataset": {}})
    assert (loader.epoch, loader.consumed_samples) == (2, 8)
    assert f"{type(options['dataset']).__name__} has no position to restore" in caplog.text
    assert "drops 1 batches" in caplog.text
    batches = iter(loader)
    assert next(batches).tolist() == [4, 5, 6, 7]
    assert loader.state_dict()["consumed_samples"] == 16
    assert [batch.tolist() for batch in batches] == [[8, 9]]
    assert loader.epoch == 3
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]


class Noisy(IterableDataset):
    """Adds a random number to each sample, as augmentation does."""

    def __iter__(self):
        return (index + float(torch.rand(()) + np.random.rand() + random.random()) / 4 for index in range(12))


def test_what_a_stream_draws_goes_on_from_the_generators_of_the_checkpoint():
    def seed():
        torch.manual_seed(1), np.random.seed(1), random.seed(1)

    seed()
    loader = loader_of(Noisy())
    batches = iter(loader)
    next(batches)
    saved, generators = loader.state_dict(), (torch.get_rng_state(), np.random.get_state(), random.getstate())
    ahead = next(batches).tolist()
    resumed = loader_of(Noisy())
    resumed.load_state_dict(saved)
    torch.set_rng_state(generators[0]), np.random.set_state(generators[1]), random.setstate(generators[2])
    assert next(iter(resumed)).tolist() == ahead


def test_a_stream_that_several_workers_read_is_pointed_out(caplog):
    with caplog.at_level(logging.WARNING, logger="zengine.data"):
        loader_of(Stream(), num_workers=1)
        assert not caplog.text
        loader_of(Stream(), num_workers=2)
    assert "Stream is a stream read by 2 worker processes: each worker yields the whole stream" in caplog.text


def test_at_the_start_of_an_epoch_nothing_is_lost_so_nothing_is_said(caplog):
    loader_of(Stream()).load_state_dict({"epoch": 2, "consumed_samples": 0, "dataset": {}})
    assert not caplog.records


def test_epochs_have_a_part_where_the_length_is_known():
    for dataset, part in ((Sized(), 1 / 3), (Stream(), 0)):
        loader = loader_of(dataset)
        next(iter(loader))
        assert loader.epochs_done() == part


def test_the_length_is_that_of_the_dataset_if_it_has_one():
    assert len(loader_of(Sized())) == 3
    assert len(loader_of(Sized(), drop_last=True)) == 2
    with pytest.raises(TypeError):
        len(loader_of(Stream()))


def test_a_position_that_the_dataset_refuses_changes_nothing_and_names_it():
    dataset = Remembering()
    loader = loader_of(dataset)
    batches = iter(loader)
    next(batches)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=r"loader state: dataset: Remembering\.load_state_dict raised KeyError"):
        loader.load_state_dict({**before, "dataset": {"place": 4}})
    assert loader.state_dict() == before
    commit = loader.prepare_load({**before, "epoch": 1, "dataset": {"position": 6}})
    assert loader.state_dict() == before
    assert next(batches).tolist() == [4, 5, 6, 7]  # the iteration goes on
    commit()
    assert loader.state_dict() == {**before, "epoch": 1, "dataset": {"position": 6}}


class Moving(Remembering):
    """Returns the dict that it goes on to change."""

    def __init__(self):
        super().__init__()
        self.state = {"position": 0}

    def __iter__(self):
        for number in super().__iter__():
            self.state["position"] = self.position
            yield number

    def state_dict(self):
        return self.state


def test_a_position_that_was_marked_does_not_move_with_the_dataset():
    loader = loader_of(Moving(), micro_batch_size=2, world_size=1)
    batches = iter(loader)
    next(batches)
    loader.mark()
    marked = json.dumps(loader.marked)
    next(batches)
    assert json.dumps(loader.marked) == marked
    assert loader.marked["dataset"] == {"position": 2}
