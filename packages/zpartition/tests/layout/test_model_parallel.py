"""Model-parallel groups and addresses of modules."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition.experts import ExpertMLP, MoE, distribute
from zpartition.layout.address import Address
from zpartition.layout.model_parallel import (
    ALONE,
    ModelParallelGroup,
    addresses_of,
    check_expert_groups,
    expert_shards_of,
    model_parallel_group_of,
    replicas_of,
)
from zpartition.tensor import parallelize
from zpartition.testing.tensor_models import PLAN, Language


def test_a_plain_model_is_alone_and_whole() -> None:
    model = torch.nn.Linear(3, 2)
    assert model_parallel_group_of(model) is ALONE
    assert addresses_of(model) == {"weight": Address.whole((2, 3)), "bias": Address.whole((2,))}


def test_a_copy_of_a_model_communicates_over_the_same_group() -> None:
    mp_group = ModelParallelGroup(object())
    assert copy.deepcopy({"cell": mp_group})["cell"] is mp_group


def test_parts_of_two_groups_in_one_model_are_rejected() -> None:
    first, second = Language(), Language()
    parallelize(first, PLAN)
    parallelize(second, PLAN)
    first.blocks[1] = second.blocks[1]
    first.blocks[1].mlp.down.placement.parallel_region.mp_group = ModelParallelGroup(object(), 4, 0)
    with pytest.raises(
        ValueError, match=r"embed and blocks.1.attention.qkv are split over different groups \(1 and 4"
    ):
        model_parallel_group_of(first)


def _mixed() -> str:
    model = Language()
    parallelize(model, PLAN)
    with pytest.raises(ValueError, match="also") as raised:
        zpartition.shard(model)
    return str(raised.value)


def test_a_partition_over_tensor_ranks_is_rejected() -> None:
    first, second = run_ranks(_mixed, 2)
    assert (
        "split over the tensor ranks [0, 1], and the group to partition it over contains rank 0 and also 1" in first
    )
    assert "contains rank 1 and also 0, which hold other parts" in second
    assert "group=zcomm.strided_group(2)" in second


def _facts() -> tuple[dict[str, Address], list[tuple[int, set[int]]], float]:
    model = Language()
    parallelize(model, PLAN)
    partition = zpartition.shard(model, group=zcomm.strided_group(2))
    copies = [(b.copy, {slot.address.num_copies for slot in b.slots}) for b in partition.layout.buckets]
    vector = torch.tensor([1.0 + zcomm.group_rank(), 5.0])
    partition.sum_over_shards(vector)
    assert vector[1] == 5.0  # what is alike in both cells is not counted twice
    pair = torch.tensor([1.0 + zcomm.group_rank(), 5.0, 5.0])
    partition.sum_over_shards(pair, num_of_model=2)
    assert pair.tolist() == [3.0, 10.0, 5.0]
    return addresses_of(model), copies, float(vector[0])


def test_copies_lie_in_buckets_of_their_own_and_squares_are_summed_over_cells() -> None:
    (first, copies, total), (second, other_copies, _) = run_ranks(_facts, 2)
    assert total == 3.0
    assert first["embed.weight"].boxes == (((0, 15), (0, 24)),)
    assert second["embed.weight"].boxes == (((15, 29), (0, 24)),)
    assert (first["norm.weight"].copy, second["norm.weight"].copy) == (0, 1)
    assert second["norm.weight"].num_copies == 2
    assert {copy for copy, _ in copies} == {0}
    assert sorted((copy, *counts) for copy, counts in other_copies) == [(0, 1), (1, 2)]


def _replicas() -> tuple[list[int], str]:
    """Ranks that hold the same parts, of neighbours; and what is said where they are not."""
    near, far = Language(), Language()
    parallelize(near, PLAN, zcomm.consecutive_group(2))
    parallelize(far, PLAN, zcomm.strided_group(2))
    with pytest.raises(ValueError, match="not 2 consecutive ranks") as raised:
        replicas_of(far)
    return dist.get_process_group_ranks(replicas_of(near)), str(raised.value)


def test_a_split_model_tells_its_replicas() -> None:
    assert replicas_of(Language()) is None
    found = run_ranks(_replicas, 4)
    assert [ranks for ranks, _ in found] == [[0, 2], [1, 3]] * 2
    assert "split over ranks [0, 2] of 4" in found[0][1]


def _dealt() -> list[str]:
    layer = MoE(4, ExpertMLP(4, 4), 2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), layer)
    assert not expert_shards_of(model)
    distribute(model, None)
    assert model_parallel_group_of(model) is ALONE  # ranks with other experts are no cells: they see other data
    address = addresses_of(model)["1.experts.stacked.up.weight"]
    rank = zcomm.group_rank()
    assert address == Address((2, 4, 4), (((rank, rank + 1), (0, 4), (0, 4)),))
    check_expert_groups(model, None)
    return sorted(expert_shards_of(model))


def test_experts_tell_who_has_which() -> None:
    assert run_ranks(_dealt, 2) == [[f"1.experts.stacked.{name}.weight" for name in ("down", "gate", "up")]] * 2
