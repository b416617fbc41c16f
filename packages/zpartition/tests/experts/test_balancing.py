"""Biases follow the tokens of all ranks, once a step."""

from __future__ import annotations

import torch
from torch import nn

import zcomm
from zcomm.testing import run_ranks
from zpartition.experts import ExpertMLP, MoE, balance, balanced_routers


def _moved() -> tuple[list[float], list[int]]:
    layer = MoE(4, ExpertMLP(4, 4), 3)
    balance(balanced_routers(layer))  # nothing to do: no message either
    layer.gate.balance_by_bias(0.5)
    layer.gate.load += torch.tensor([4, 0, 2]) if zcomm.group_rank() == 0 else torch.tensor([0, 0, 6])
    balance(balanced_routers(nn.Sequential(layer)))
    return layer.gate.bias.tolist(), layer.gate.load.tolist()


def test_the_tokens_of_all_ranks_update_the_bias() -> None:
    """Loads are 4, 0, 8, their mean is 4."""
    assert run_ranks(_moved, 2) == [([0.0, 0.5, -0.5], [0, 0, 0])] * 2
