"""Degrees, layouts of ranks, and groups on real ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm import Degrees, Groups
from zcomm.testing import end_ranks, run_ranks


def test_degrees_are_inferred_and_checked_with_their_numbers() -> None:
    assert Degrees(tensor=2, pipeline=2).resolved(16) == Degrees(pipeline=2, shard=4, tensor=2)
    for degrees, message in [
        (Degrees(tensor=3), "tensor=3 does not hold: 3 must divide the world size 8"),
        (Degrees(shard=2, tensor=2), "shard=2 x sequence=1 x tensor=2 does not hold: 4 is not the world size 8"),
        (Degrees(tensor=2, expert=3), r"expert=3 must divide the 4 ranks .*replicate=1 x shard=4.*one of 1, 2, 4\."),
        (Degrees(tensor=2, expert=0), "expert=0 must divide"),
    ]:
        with pytest.raises(ValueError, match=message):
            degrees.resolved(8)


def test_every_kind_of_ranks_covers_the_world_once() -> None:
    degrees = Degrees(pipeline=2, replicate=1, sequence=2, tensor=2, expert=2)
    all_ranks = [Groups.of(degrees, 16, rank) for rank in range(16)]
    for kind in (
        lambda g: g.ranks("tensor"), lambda g: g.ranks("sequence"), lambda g: g.ranks("pipeline"),
        lambda g: g.ranks("replicate", "shard", "sequence"), Groups.expert_ranks, Groups.expert_data_ranks,
    ):  # fmt: skip
        assert all(groups.rank in kind(groups) for groups in all_ranks)
        assert sorted(rank for ranks in {kind(groups) for groups in all_ranks} for rank in ranks) == list(range(16))
    groups = all_ranks[5]
    assert groups.ranks("tensor") == (4, 5)
    assert groups.ranks("sequence") == (5, 7)
    assert groups.ranks("pipeline") == (5, 13)
    assert groups.ranks("replicate", "shard") == (1, 5)
    assert (groups.expert_ranks(), groups.expert_data_ranks()) == ((5, 7), (1, 5))
    assert groups.get_model_parallel_world_size() == 2
    assert groups.get_sequence_data_parallel_rank() == 2
    with pytest.raises(AttributeError, match="no 'get_nothing_rank'"):
        groups.get_nothing_rank()


def _sums() -> dict[str, list[float]]:
    mine = dist.get_rank()
    mesh = zcomm.make_mesh(shard=2, tensor=2)
    ways = {"degrees": Groups.of(Degrees(tensor=2, expert=2)), "mesh": Groups.from_mesh(mesh)}
    ways["mpu"] = Groups.from_mpu(ways["degrees"])
    newer = SimpleNamespace(  # in Megatron-Core the model-parallel group spans the stages, too
        get_model_parallel_group=ways["degrees"].world,
        get_tensor_model_parallel_group=ways["degrees"].tensor,
        get_data_parallel_group=ways["degrees"].data,
    )
    ways["newer mpu"] = Groups.from_mpu(newer)
    del newer.get_tensor_model_parallel_group
    with pytest.raises(ValueError, match=r"mpu.get_model_parallel_group\(\) and the data-parallel group \["):
        Groups.from_mpu(newer)
    found = {}
    for name, groups in ways.items():
        sums = []
        for group in (groups.get_model_parallel_group(), groups.get_data_parallel_group(), groups.gradient()):
            number = torch.tensor([float(mine)])
            zcomm.all_reduce(number, group)
            sums.append(float(number))
        found[name] = sums
    assert ways["mpu"].tensor() is ways["degrees"].tensor()
    assert ways["degrees"].get_expert_parallel_world_size() == 2
    assert ways["degrees"].experts() is ways["degrees"].gradient()  # the same ranks, one group
    short = Groups.from_mesh(zcomm.make_mesh(dp=2, tp=2))
    assert (short.axes, short.ranks("tensor")) == (("shard", "tensor"), ways["mesh"].ranks("tensor"))
    assert short.world() is dist.group.WORLD
    assert short.split_over(ways["mesh"].tensor()).tensor() is ways["mesh"].tensor()  # those it has itself
    with pytest.raises(ValueError, match=r"split over ranks \[.*its tensor ranks were given as \["):
        short.split_over(ways["mesh"].data())
    with pytest.raises(ValueError, match="two of which are"):
        Groups.from_mesh(zcomm.make_mesh(dp=2, fsdp=2))
    with pytest.raises(ValueError, match=r"the mesh has axes other; allowed are pipeline, replicate"):
        Groups.from_mesh(zcomm.make_mesh(other=4))
    return found


def test_independent_replicas_sum_gradients_inside() -> None:
    degrees = Degrees(replicate=2, shard=2, sequence=2, tensor=2, expert=2)
    summed, apart = (Groups.of(degrees, 16, 5) for _ in range(2))
    apart.independent = True
    assert summed.gradient_ranks() == (1, 3, 5, 7, 9, 11, 13, 15)
    assert apart.gradient_ranks() == (1, 3, 5, 7)
    assert summed.replica_ranks() == tuple(range(16))
    assert apart.replica_ranks() == tuple(range(8))
    assert apart.ranks("replicate") == (5, 13)
    assert apart.expert_ranks() == (5, 7)
    assert apart.expert_data_ranks() == (1, 5)
    assert apart.get_sequence_data_parallel_world_size() == 4
    assert apart.get_data_parallel_world_size() == 4
    pipelined = Groups.of(Degrees(pipeline=2, replicate=2, shard=2), 8, 5)
    pipelined.independent = True
    assert pipelined.replica_ranks() == (0, 1, 4, 5)


def test_groups_come_from_degrees_a_mesh_or_an_mpu() -> None:
    try:
        for rank, found in enumerate(run_ranks(_sums, 4)):
            tensor, data = (1.0 if rank < 2 else 5.0), (2.0 if rank % 2 == 0 else 4.0)
            assert found == {way: [tensor, data, data] for way in ("degrees", "mesh", "mpu", "newer mpu")}
    finally:
        end_ranks()  # torch never frees meshes


def test_alone_there_are_no_groups() -> None:
    groups = Groups.of(Degrees(), 1, 0)
    assert groups.ranks("tensor") == (0,)
    assert groups.get_data_parallel_rank() == 0
