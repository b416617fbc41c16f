"""Queries of a partition about the gradients of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zpartition
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


class WithOutside(nn.Module):
    """A trained layer and others that no bucket holds."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def partition_of(model: nn.Module) -> zpartition.Partition:
    return zpartition.shard(model, None, policy=ZeroPolicy())


def state_of(found: Any) -> object:
    """Return where a tensor is, or what is in a dict."""
    return found.data_ptr() if isinstance(found, torch.Tensor) else {key: id(value) for key, value in found.items()}


def give_gradients(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)


@pytest.mark.parametrize("watches", [False, True])
def test_gradients_outside_of_buckets_are_dropped_after_every_change_of_the_module(watches: bool) -> None:
    def watch(found: list[Any]) -> Callable[[], bool]:
        before = [state_of(each) for each in found]
        return lambda: [state_of(each) for each in found] == before

    model = WithOutside()
    partition = partition_of(model)
    if watches:
        partition.watch_tensors = watch
    changes = (
        lambda: None,
        lambda: setattr(model, "added", nn.Sequential(nn.Linear(2, 2))),
        lambda: setattr(model, "added", nn.Sequential(nn.Linear(3, 3))),  # as many parameters and children
        lambda: setattr(model.added, "0", nn.Linear(3, 3)),
        lambda: model.added[0].register_parameter("scale", nn.Parameter(torch.ones(3))),
        lambda: setattr(model.added[0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda: delattr(model, "frozen"),
    )
    for change in changes:
        change()
        inside = set(map(id, partition.params.values()))
        outside = [param for param in model.parameters() if id(param) not in inside]
        assert set(map(id, partition.parameters_outside())) == set(map(id, outside))
        give_gradients(list(model.parameters()))
        partition.zero_grad()
        assert all(param.grad is None for param in model.parameters())
    partition.close()


def test_unwatched_and_watched_partitions_notice_a_moved_parameter_after_steps() -> None:
    def watch(found: list[Any]) -> Callable[[], bool]:
        before = [state_of(each) for each in found]

        def are_same() -> bool:
            asked.append(type(found[0]))
            return [state_of(each) for each in found] == before

        return are_same

    for watches in (False, True):
        model, asked = nn.Linear(4, 4), list[type]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        partition = zpartition.shard(model, optimizer, policy=ZeroPolicy())
        if watches:
            partition.watch_tensors = watch
        for _ in range(3):
            step(partition, model, optimizer)
        assert asked.count(torch.Tensor) == (2 if watches else 0)  # the first step looks at each tensor
        model.weight.data = model.weight.data.clone()
        with pytest.raises(ValueError, match="weight no longer lives in the partition's memory"):
            step(partition, model, optimizer)
        partition.close()


def step(partition: zpartition.Partition, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with partition.micro_step():
        model(torch.ones(2, 4)).sum().backward()
    partition.finish_gradients()
    try:
        partition.apply(optimizer.step)
    finally:
        partition.zero_grad()
