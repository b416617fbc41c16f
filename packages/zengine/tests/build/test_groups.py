"""Process groups of an engine: from the config, a mesh, an mpu or a split model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import zcomm
import zengine
from zcomm.testing import end_ranks, run_ranks
from zengine.build.groups import process_layout
from zpartition.tensor import tp_model_init
from zpartition.testing.tensor_models import PLAN, Gated, Language


def test_mpu_and_mesh_together_are_refused() -> None:
    with pytest.raises(ValueError, match="both mpu= and mesh="):
        process_layout(object(), object(), nn.Module())


def test_stages_of_an_mpu_are_refused_with_their_number() -> None:
    mpu = SimpleNamespace(get_pipeline_model_parallel_world_size=lambda: 2, get_data_parallel_group=lambda: None)
    with pytest.raises(ValueError, match=r"get_pipeline_model_parallel_world_size\(\) is 2.*axis 'pipeline'"):
        process_layout(mpu, None, nn.Module())
    mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 2, get_data_parallel_group=lambda: None)
    with pytest.raises(ValueError, match=r"get_model_parallel_world_size\(\) is 2"):
        process_layout(mpu, None, nn.Module())


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("get_pipe_parallel_world_size", "PipelineModule"),
        ("get_sequence_parallel_world_size", "axis 'sequence'"),
        ("get_context_parallel_world_size", '"sequence_parallel_size"'),
        ("get_expert_model_parallel_world_size", '"expert_parallel"'),
    ],
)
def test_other_axes_of_an_mpu_are_refused_with_a_remedy(name: str, remedy: str) -> None:
    mpu = SimpleNamespace(**{name: lambda: 2}, get_data_parallel_group=lambda: None)
    with pytest.raises(ValueError, match=rf"{name}\(\) is 2.*{remedy}"):
        process_layout(mpu, None, nn.Module())


def test_an_mpu_of_replicas_gives_its_group() -> None:
    group: Any = dist.group.WORLD if dist.is_initialized() else object()  # of this one rank
    mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 1, get_data_parallel_group=lambda: group)
    found = process_layout(mpu, None, nn.Module())
    groups = found.make(zcomm.Degrees())
    assert (found.replicas, found.source, groups.given) == (1, "mpu=", {(0,): group})


def test_experts_of_one_engine_are_not_those_of_whoever_has_the_same_groups() -> None:
    given = zcomm.Groups.of(zcomm.Degrees(expert=2), 4, 0)
    made = process_layout(given, None, nn.Module()).make(zcomm.Degrees(shard=4))
    assert (made.expert, given.expert) == (1, 2)


def _ways() -> dict[str, tuple[Any, ...]]:
    """For each way: copies, tensor ranks, gradient ranks, and that everybody is the world."""
    mesh = zcomm.make_mesh(shard=2, tensor=2)
    degrees = zcomm.Degrees(tensor=2)
    whole, split = nn.Linear(2, 2), tp_model_init(Language(), 2, config=PLAN)
    ways = {
        "config": process_layout(None, None, whole),
        "mesh": process_layout(None, mesh, whole),
        "mpu": process_layout(zcomm.Groups.of(degrees), None, whole),
        "model": process_layout(None, None, split),
        "model and the replicas of a mesh": process_layout(None, mesh["shard"], split),
    }
    found: dict[str, tuple[Any, ...]] = {}
    for name, way in ways.items():
        groups = way.make(degrees.resolved(4))
        is_world = groups.world() is dist.group.WORLD
        found[name] = (way.replicas, groups.ranks("tensor"), groups.ranks("shard"), is_world)
        for group in (groups.tensor(), groups.gradient()):
            assert group is not None
            zcomm.barrier(group)
    alone = process_layout(None, mesh["shard"], whole)  # two copies in two halves of the world
    found["half"] = (alone.replicas, alone.num_ranks, tuple(dist.get_process_group_ranks(alone.world())))
    return found


def _elsewhere() -> str:
    config = {"train_micro_batch_size_per_gpu": 1}
    mpu = zcomm.Groups.of(zcomm.Degrees(tensor=2))
    with pytest.raises(ValueError, match=r"mpu= has 2 tensor ranks, and no parameter of Gated is marked") as caught:
        zengine.initialize(model=Gated(8), mpu=mpu, config=config)
    given = {"layer_specs": [{"patterns": ["gate.*|up.*"]}, {"patterns": ["down.*"], "partition_type": "row"}]}
    section = {"autotp_size": 2, "partition_config": given}
    engine = zengine.initialize(model=Gated(8), mpu=mpu, config={**config, "tensor_parallel": section})[0]
    assert engine.module.up.out_features == 4
    engine.close()
    return str(caught.value)


def test_tensor_ranks_of_an_mpu_split_no_model_that_is_not_asked_for() -> None:
    for message in run_ranks(_elsewhere, 2):
        assert '"autotp_size": 2' in message


def test_all_ways_come_to_the_same_ranks() -> None:
    try:
        for rank, found in enumerate(run_ranks(_ways, 4)):
            tensor, data = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
            assert found.pop("half") == (2, 2, data)
            copies = {name: way[0] for name, way in found.items()}
            assert copies == {**dict.fromkeys(found, 2), "config": 4}  # the config has not split anything yet
            assert {way[1:] for way in found.values()} == {(tensor, data, True)}
    finally:
        end_ranks()  # torch keeps meshes for ever
