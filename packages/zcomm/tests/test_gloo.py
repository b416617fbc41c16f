"""Gather and scatter over Gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm import gloo
from zcomm.testing import run_ranks


def _in_place_scatter_equals_all_reduce(world_size: int) -> bool:
    rank = zcomm.group_rank()
    values = torch.randn(world_size * 1000, generator=torch.Generator().manual_seed(rank))
    summed = values.clone()
    zcomm.all_reduce(summed)
    own = slice(rank * 1000, (rank + 1) * 1000)
    zcomm.reduce_scatter(values[own], values)
    return torch.equal(values[own], summed[own])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_in_place_scatter_sums_in_the_order_of_an_all_reduce(world_size):
    assert all(run_ranks(_in_place_scatter_equals_all_reduce, world_size, world_size))


def _gather_in_subgroups() -> list[int]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    output = torch.empty(4, dtype=torch.bfloat16)
    zcomm.all_gather(output, torch.full((2,), rank, dtype=torch.bfloat16), groups[rank % 2])
    return output.int().tolist()


def test_a_gather_in_a_subgroup_addresses_its_own_ranks():
    assert run_ranks(_gather_in_subgroups, 4) == [[0, 0, 2, 2], [1, 1, 3, 3]] * 2


def _handles() -> tuple[bool, list[float]]:
    output = torch.empty(6)
    handle = zcomm.all_gather(output, torch.full((3,), float(zcomm.group_rank())), async_op=True)
    handle.wait()
    handle.wait()
    return handle.is_done(), output.tolist()


def test_several_messages_are_one_handle():
    assert run_ranks(_handles, 2) == [(True, [0.0] * 3 + [1.0] * 3)] * 2


def _empty() -> int:
    output = torch.empty(0)
    zcomm.all_gather(output, torch.empty(0))
    return output.numel()


def test_nothing_can_be_gathered():
    assert run_ranks(_empty, 2) == [0, 0]


def _carried() -> bool:
    return gloo.carries(torch.ones(1), None)


def test_a_cpu_tensor_of_a_gloo_group_is_carried_by_gloo():
    assert all(run_ranks(_carried, 2))
