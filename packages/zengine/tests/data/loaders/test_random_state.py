"""Ranks that share a copy of the model are given the same samples, drawn ones too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.data.loaders.fetch import iterate_seeded, preserve_generators, seed_generators


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Noisy(Dataset[Any]):
    """Samples that are augmented, by all generators there are."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(draw()).repeat(2)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(draw()).repeat(2) for _ in range(8))


def masked(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(len(samples), 6)


def test_draws_go_on_by_themselves_and_are_not_missing_from_the_others() -> None:
    seed_generators(1)
    expected = [draw() for _ in range(4)]
    seed_generators(1)
    own = iterate_seeded((draw() for _ in range(3)), 7)
    found = [expected[0] == draw(), (first := next(own)), expected[1] == draw(), (second := next(own))]
    assert found[0]
    assert found[2]
    assert first != second
    assert list(islice(iterate_seeded((draw() for _ in range(3)), 7), 2)) == [first, second]
    assert len(list(own)) == 1
    with preserve_generators():
        draw()
    assert draw() == expected[2]


def batches(tensor: int) -> list[Any]:
    """What this rank is given by each kind of loader; its generators are its own."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    rank = zcomm.group_rank()
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    config = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": tensor}}
    engine, _, loader, _ = zengine.initialize(model=module, training_data=Noisy(), collate_fn=masked, config=config)
    torch.manual_seed(rank)
    loaders = (loader, engine.deepspeed_io(Noisy(), route="eval"), engine.deepspeed_io(Stream()))
    found = [[batch.tolist() for batch in islice(each, 2)] for each in loaders]
    engine.close()
    return found


def test_ranks_of_one_copy_see_the_same_draws_and_copies_different_ones() -> None:
    one, other = run_ranks(batches, 2, 2)
    assert one == other
    assert all(first != second for first, second in one)
    one, other = run_ranks(batches, 2, 1)
    assert all(mine != theirs for mine, theirs in zip(one, other))


def streams() -> str:
    """A stream has no sample to try a plan with; the model's own plan needs none."""
    plan = {"0": "colwise", "2": "rowwise"}
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    module.tp_plan = plan  # type: ignore[assignment]
    config = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}}
    engine, *_ = zengine.initialize(model=module, training_data=Stream(), config=config)
    found = type(engine.module[0]).__name__
    engine.close()
    return found


def test_a_stream_trains_a_split_model() -> None:
    assert run_ranks(streams, 2) == ["ColumnLinear"] * 2
