"""Tensors arrive at the next rank, while the sender keeps them."""

from __future__ import annotations

import torch

import zcomm
from zcomm.testing import run_ranks
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.sequence.ring import ring_exchange


def _turn() -> list[list[float]]:
    mp_group, mine = ModelParallelGroup.of(None), float(zcomm.group_rank())
    here = (torch.full((3,), mine), torch.full((2, 2), mine, dtype=torch.float64))
    seen = []
    for _ in range(mp_group.size):
        pending = ring_exchange(here, mp_group)
        seen.append([float(each.mean()) for each in here])
        here = pending.wait()
    assert here[1].shape == (2, 2)
    return [*seen, [float(each.mean()) for each in here]]


def test_after_size_rounds_every_rank_has_its_own_tensors_again() -> None:
    for rank, found in enumerate(run_ranks(_turn, 3)):
        assert found == [[float((rank - step) % 3)] * 2 for step in range(4)]


def test_one_rank_sends_nothing() -> None:
    x = torch.ones(2)
    assert ring_exchange((x,), ModelParallelGroup(None)).wait()[0] is x
