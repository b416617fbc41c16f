"""Queries of a partition about the gradients of a step."""

from __future__ import annotations

import torch
from torch import nn

import zcomm
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy, shard


def _facts(stage: int) -> list[str]:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
    partition = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=ZeroPolicy(stage=stage))
    with partition.micro_step():
        model["used"](torch.ones(1, 2)).sum().backward()
    partition.finish_gradients()
    assert (partition.num_arrived(), partition.num_unused()) == (2, 2)
    named = dict(partition.named_gradients())
    assert all(grad.eq(1).all() for name, grad in named.items() if name.startswith("used"))
    squares = sum(float(grad.square().sum()) for grad in named.values())
    total = torch.tensor([squares, 1.0], dtype=torch.float64)
    partition.sum_over_shards(total)
    assert total.tolist() == [3.0, zcomm.group_size()]  # each gradient once, everything else of every rank
    partition.close()
    return sorted(named)


def test_counts_and_sums_are_of_all_ranks_and_names_of_this_one() -> None:
    names = ["idle.bias", "idle.weight", "used.bias", "used.weight"]
    assert run_ranks(_facts, 2, 0) == [names, names]
    first, second = run_ranks(_facts, 2, 2)
    assert sorted({*first, *second}) == names
