"""Checkpoints of tensor-parallel models load under any other split, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

import zckpt
import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import Partition, ZeroPolicy
from zpartition.tensor import parallelize
from zpartition.testing.tensor_models import PLAN, Language


class World:
    """All ranks, as zckpt's Protocol requires."""

    def __init__(self) -> None:
        self.rank, self.world_size = zcomm.group_rank(), zcomm.group_size()

    def exchange(self, value: Any) -> list[Any]:
        return zcomm.all_gather_object(value)


def make(stage: int, *, tensor: int, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Partition]:
    """Make a model over `tensor` consecutive ranks; other ranks are replicas."""
    model = Language()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if tensor > 1:
        parallelize(model, PLAN, zcomm.consecutive_group(tensor))
    policy = ZeroPolicy(stage=stage, bucket_numel=2000, unit_numel=2000, persist_numel=20, max_live_numel=0)
    return model, optimizer, zpartition.shard(model, optimizer, policy=policy, group=zcomm.strided_group(tensor))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, partition: Partition, seed: int) -> float:
    tokens = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(seed))
    with partition.micro_step():
        loss = model(tokens)
        loss.backward()
    partition.finish_gradients()
    partition.apply(optimizer.step)
    partition.zero_grad()
    return float(loss.detach())


def saved(root: Path, tag: str, optimizer: torch.optim.Optimizer, partition: Partition) -> None:
    states = zpartition.state_shards(optimizer, partition.holders)
    shards = [*partition.shards(), *(attrs.evolve(shard, name=f"{key}.{shard.name}") for key, shard in states)]
    zckpt.save(root, tag, shards=shards, peers=World())


def loaded(root: Path, tag: str, optimizer: torch.optim.Optimizer, partition: Partition) -> None:
    kinds = {"exp_avg": torch.float64, "exp_avg_sq": torch.float64, "step": torch.float32}
    shape = {"exp_avg": (), "exp_avg_sq": ()}
    staged = zpartition.make_state(
        optimizer, partition.holders, lambda _: {key: (dtype, shape.get(key)) for key, dtype in kinds.items()}
    )
    states = [attrs.evolve(shard, name=f"{key}.{shard.name}") for key, shard in staged.shards()]
    zckpt.load(root, tag, tensors=[*partition.shards_to_fill(), *states], peers=World())
    staged.hand_over()
    partition.publish()


def content(optimizer: torch.optim.Optimizer, partition: Partition) -> dict[Any, torch.Tensor]:
    states = zpartition.state_shards(optimizer, partition.holders)
    shards = [*(("", shard) for shard in partition.shards()), *states]
    return {(key, shard.name, shard.box, shard.span): shard.tensor.clone() for key, shard in shards}


def _there_and_back(root: Path) -> tuple[list[float], list[float]]:
    first = make(3, tensor=2)
    for seed in range(2):
        step(*first, seed)
    saved(root, "split", *first[1:])
    before = content(*first[1:])
    whole = make(2, tensor=1, seed=1)  # two replicas of the whole model
    loaded(root, "split", *whole[1:])
    saved(root, "whole", *whole[1:])
    again = make(0, tensor=2, seed=2)
    loaded(root, "whole", *again[1:])
    saved(root, "again", *again[1:])
    third = make(3, tensor=2, seed=3)
    loaded(root, "again", *third[1:])
    after = content(*third[1:])
    assert [key for key in before | after if not torch.equal(before[key], after[key])] == []
    losses = [[step(*which, seed) for seed in (2, 3)] for which in (first, whole, again, third)]
    assert losses[0] == losses[3]
    return max(losses, key=lambda row: abs(row[1] - losses[0][1])), losses[0]


def test_two_tensor_ranks_to_one_and_back(tmp_path: Path) -> None:
    for farthest, losses in run_ranks(_there_and_back, 2, tmp_path):
        assert max(abs(a - b) for a, b in zip(farthest, losses)) < 1e-12
