"""Groups of a partition."""

from __future__ import annotations

import pytest
import torch

import zcomm
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.layout.layout import ParamSpec, plan_layout
from zpartition.layout.ranks import Ranks, shard_group_size


def _groups() -> list[object]:
    whole = Ranks.of(None, ZeroPolicy(stage=3))
    assert whole.shard is whole.world
    ranks = Ranks.of(None, ZeroPolicy(stage=3, shard_group_size=2))
    duplicate = ranks.duplicate()
    members = [zcomm.all_gather_object(ranks.rank, group) for group in (ranks.shard, ranks.replicas, duplicate.shard)]
    assert duplicate.shard is not ranks.shard
    return [(whole.num_shards, whole.num_replicas, ranks.num_shards, ranks.num_replicas), *members]


def test_hybrid_groups_are_runs_and_those_at_the_same_place() -> None:
    found = run_ranks(_groups, 4)
    assert found[0] == [(4, 1, 2, 2), [0, 1], [0, 2], [0, 1]]
    assert found[3] == [(4, 1, 2, 2), [2, 3], [1, 3], [2, 3]]


def test_alone_there_are_no_groups() -> None:
    ranks = Ranks.of(None, ZeroPolicy(stage=2))
    assert (ranks.world, ranks.shard, ranks.rank, ranks.size, ranks.num_shards) == (None, None, 0, 1, 1)
    assert ranks.duplicate().world is None


def test_a_size_that_does_not_fit_is_rejected_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="3 does not divide the world size 4: choose one of 1, 2, 4"):
        shard_group_size(ZeroPolicy(stage=1, shard_group_size=3), 4)
    with pytest.raises(ValueError, match="stage 0 shards nothing"):
        ZeroPolicy(stage=0, shard_group_size=2)


def _holders() -> list[list[int]]:
    plain = Ranks.of(None, ZeroPolicy(stage=3), expert_shards=[2])
    hybrid = Ranks.of(None, ZeroPolicy(stage=3, shard_group_size=2), expert_shards=[2])
    shared = plan_layout([ParamSpec("a", (4,), torch.float32)], world_size=4, num_shards=4).buckets[0]
    dealt = plan_layout(
        [ParamSpec("b", (4,), torch.float32, num_expert_shards=2)], world_size=4, num_shards=4
    ).buckets[0]
    assert plain.groups_for(shared) is plain
    found = [plain.groups_for(dealt).world, plain.groups_for(dealt).shard, plain.duplicate().groups_for(dealt).world]
    found += [hybrid.groups_for(dealt).world, hybrid.groups_for(dealt).shard]
    return [zcomm.all_gather_object(plain.rank, group) for group in found]


def test_what_is_dealt_out_lives_over_one_rank_of_each_run() -> None:
    """In a hybrid, a run of two holds a copy of the weights, and one rank of it each expert."""
    for rank, found in enumerate(run_ranks(_holders, 4)):
        mates = [rank % 2, rank % 2 + 2]
        assert found == [mates, mates, mates, mates, [rank]]


def test_holders_have_no_groups_of_neighbours() -> None:
    policy = ZeroPolicy(stage=3, weight_bits=8, gradient_bits=4, secondary_group_size=2, gradient_hop_size=2)
    dealt = plan_layout(
        [ParamSpec("b", (4,), torch.float32, num_expert_shards=2)], world_size=4, num_shards=4
    ).buckets[0]
    assert (policy.of(dealt).secondary_group_size, policy.of(dealt).gradient_hop_size) == (0, 0)
    assert policy.of(dealt).gradient_bits == 4
    shared = plan_layout([ParamSpec("a", (4,), torch.float32)], world_size=4, num_shards=4).buckets[0]
    assert policy.of(shared) is policy
