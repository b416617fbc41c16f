"""Who is who under deepspeed.comm's names."""

from __future__ import annotations

import pytest
import torch.distributed

import zengine.deepspeed.comm as dist
from zcomm.testing import run_ranks
from zengine.deepspeed.comm import world


def check_two() -> tuple[object, ...]:
    dist.init_distributed()  # a world exists already: nothing happens
    alone = dist.new_group([dist.get_rank()]) if dist.get_world_size() == 1 else dist.new_group([0, 1])
    mesh = dist.initialize_mesh_device((2,), ("data",))
    return (
        dist.is_initialized(),
        dist.get_rank(),
        dist.get_world_size(),
        dist.get_all_ranks_from_group(alone),
        dist.get_global_rank(alone, 1),
        dist.get_world_group() is torch.distributed.group.WORLD,
        tuple(mesh.mesh_dim_names or ()),
    )


def test_two_ranks_know_each_other():
    first, second = run_ranks(check_two, 2)
    assert first == (True, 0, 2, [0, 1], 1, True, ("data",))
    assert second[1] == 1


def test_without_a_group_this_process_is_alone(monkeypatch):
    monkeypatch.setattr(world, "is_initialized", lambda: False)
    assert (world.get_rank(), world.get_world_size(), world.get_all_ranks_from_group()) == (0, 1, [0])
    with pytest.raises(ValueError, match="has no default process group"):
        world.init_distributed(dist_init_required=False)


def test_what_a_back_end_can_do_is_told():
    assert dist.has_all_gather_into_tensor()
    assert dist.has_reduce_scatter_tensor()
    assert dist.has_all_reduce_coalesced()
    assert not dist.has_coalescing_manager()
    assert dist.get_local_rank() == 0


def test_nccl_on_a_host_without_a_gpu_is_gloo(monkeypatch, caplog):
    asked: list[str | None] = []
    monkeypatch.setattr(world, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(world.zcomm, "init", lambda backend, **_: asked.append(backend))
    world.init_distributed(dist_backend="nccl")
    assert asked == ["gloo"]
    assert "no GPU is visible" in caplog.text
