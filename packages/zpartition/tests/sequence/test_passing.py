"""What is handed on arrives at the next rank, while the giver still has it."""

from __future__ import annotations

import torch

import zcomm
from zcomm.testing import run_ranks
from zpartition.cells import Cell
from zpartition.sequence.passing import hand_on


def _turn() -> list[list[float]]:
    cell, mine = Cell.of(None), float(zcomm.group_rank())
    here = (torch.full((3,), mine), torch.full((2, 2), mine, dtype=torch.float64))
    seen = []
    for _ in range(cell.size):
        under_way = hand_on(here, cell)
        seen.append([float(each.mean()) for each in here])
        here = under_way.wait()
    assert here[1].shape == (2, 2)
    return [*seen, [float(each.mean()) for each in here]]


def test_after_a_turn_everybody_has_their_own_again() -> None:
    for rank, found in enumerate(run_ranks(_turn, 3)):
        assert found == [[float((rank - step) % 3)] * 2 for step in range(4)]


def test_alone_nothing_travels() -> None:
    x = torch.ones(2)
    assert hand_on((x,), Cell(None)).wait()[0] is x
