"""Shards that a checkpoint saves, and shards that it loads into, at every tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zpartition import LazyShard, Offload, Tier
from zpartition.testing import make, train


@pytest.mark.parametrize("tier", list(Tier))
def test_what_is_filled_is_what_is_saved_once_it_is_published(tier: Tier, tmp_path: Path) -> None:
    model, optimizer, partition = make(Offload(states=tier, directory=str(tmp_path)), 1, torch.bfloat16)
    train(partition, model, optimizer, range(1), 1)
    saved = {shard.name: shard.tensor.clone() for shard in partition.shards()}
    assert all(isinstance(shard, LazyShard) == (tier is Tier.DISK) for shard in partition.shards())
    for shard in partition.shards_to_fill():
        assert torch.equal(shard.tensor, saved[shard.name])
        shard.tensor.mul_(2)
    partition.publish()
    assert {shard.name: (shard.span, shard.global_shape) for shard in partition.shards()} == {
        shard.name: (shard.span, shard.global_shape) for shard in partition.shards_to_fill()
    }
    for shard in partition.shards():
        assert torch.equal(shard.tensor, saved[shard.name] * 2)
        assert torch.equal(model.get_parameter(shard.name).reshape(-1), (saved[shard.name] * 2).bfloat16())
    partition.close()
