"""Ranks that were seeded alike draw different numbers inside, and equal numbers outside."""

from __future__ import annotations

import torch
from torch import nn

from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.sequence.random_state import rank_random_state, uses_dropout

CPU = torch.device("cpu")


def drawn(rank: int) -> tuple[list[float], float]:
    torch.manual_seed(0)
    with rank_random_state(ModelParallelGroup(None, 2, rank), CPU):
        inside = torch.rand(4).tolist()
    return inside, float(torch.rand(()))


def test_numbers_differ_inside_and_agree_outside() -> None:
    first, second = drawn(0), drawn(1)
    assert first[0] != second[0]
    assert first[1] == second[1]
    assert drawn(1) == second


def test_each_use_draws_new_numbers() -> None:
    torch.manual_seed(0)
    seen = []
    for _ in range(2):
        with rank_random_state(ModelParallelGroup(None, 2, 0), CPU):
            seen.append(torch.rand(4).tolist())
    assert seen[0] != seen[1]


def test_uses_dropout_finds_rates_and_layers() -> None:
    assert uses_dropout(None, 0.1)
    assert not uses_dropout(None, 0.0)
    layer = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.2))
    assert uses_dropout(layer, 0.0)
    assert not uses_dropout(layer.eval(), 0.0)
    assert not uses_dropout(nn.Sequential(nn.Dropout(0.0)), 0.0)
