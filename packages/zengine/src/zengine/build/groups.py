"""Who the ranks of an engine are to each other, when there are several ways to say it.

A mesh or an `mpu` lays out all axes, a model that was split before lays out its tensor ranks, and the config lays out
what is left.  What the caller says is a `LaidOut`: degrees that `resolve` checks the config against, and how to come
to the groups once it is resolved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import zcomm
import zpartition
from zengine.build.expert_parallel import expert_axes
from zengine.config.plan.parallel import TENSOR_KEYS
from zengine.engine.stages import stage_axes

if TYPE_CHECKING:
    from zengine.config import Plan

__all__ = ["LaidOut", "laid_out", "refuse_split_elsewhere"]

_AXES = ("pipeline", "replicate", "shard", "sequence", "tensor")
_SIZES = {  # getters of an mpu, and the axis that each speaks of
    "get_model_parallel_world_size": "tensor",
    "get_tensor_model_parallel_world_size": "tensor",
    "get_pipeline_model_parallel_world_size": "pipeline",
    "get_sequence_parallel_world_size": "sequence",
}


@attrs.frozen(eq=False)
class LaidOut:
    """What a caller says about ranks."""

    make: Callable[[zcomm.Degrees], zcomm.Groups]  # from the resolved degrees
    num_ranks: int  # of the engine: a mesh may have a part of the world
    axes: Mapping[str, int] = attrs.field(factory=dict)  # degrees that are settled
    by: str = ""  # who says so

    world: Callable[[], ProcessGroup | None] = lambda: None  # the group of those ranks

    @property
    def replicas(self) -> int:
        """Copies of the model as it comes."""
        return self.num_ranks // math.prod(self.axes.get(axis, 1) for axis in ("pipeline", "sequence", "tensor"))


def laid_out(mpu: Any, mesh: DeviceMesh | None, model: nn.Module) -> LaidOut:
    """Return the process layout that the arguments of `initialize` give.

    A collective if there is an mpu, or a mesh beside a split model.

    Raises:
        ValueError: both were given; the mesh has axes that are not known; the mpu's groups are no table; or a model
            is split over ranks whose partners cannot be told.
    """
    if mpu is not None and mesh is not None:
        raise ValueError("initialize() got both mpu= and mesh=: they may disagree about the ranks, keep one")
    found = _laid_out(mpu, mesh, model)
    experts = expert_axes(model)
    return attrs.evolve(found, axes={**found.axes, **experts}, by=found.by or "the model") if experts else found


def _laid_out(mpu: Any, mesh: DeviceMesh | None, model: nn.Module) -> LaidOut:
    split, stages = zpartition.model_parallel_group_of(model), stage_axes(model)
    if mesh is not None or mpu is not None:
        groups = zcomm.Groups.from_mesh(mesh) if mesh is not None else _of_mpu(mpu)
        return _fixed(
            groups.split_over(_ranks_of(split)) if split.size > 1 else groups, "mesh=" if mpu is None else "mpu="
        )
    if split.size == 1:
        return LaidOut(zcomm.Groups.of, zcomm.group_size(), stages, "the model")
    zpartition.replicas_of(model)  # refuses tensor ranks that are no neighbours
    tensor = _ranks_of(split)

    def make(degrees: zcomm.Degrees) -> zcomm.Groups:
        return zcomm.Groups.of(degrees).split_over(tensor)

    return LaidOut(make, zcomm.group_size(), {"tensor": split.size, **stages}, "the model")


def refuse_split_elsewhere(model: nn.Module, plan: Plan, ranks: LaidOut) -> None:
    """ValueError for tensor ranks of an mpu and a model that is whole to us, unless the config wants it split.

    An mpu comes with layers of its own that are split already, and splitting those again is not what was meant.
    """
    is_asked = any(plan.origins.get(key, "default") != "default" for key in TENSOR_KEYS)
    tensor = plan.parallel.degrees.tensor
    if ranks.by != "mpu=" or tensor == 1 or is_asked or zpartition.model_parallel_group_of(model).size > 1:
        return
    raise ValueError(
        f"mpu= has {tensor} tensor ranks, and {type(model).__name__} has no layers of zpartition.tensor: if it is "
        f'whole, write "tensor_parallel": {{"autotp_size": {tensor}}} to have it split; layers that another library '
        "has split are not known here."
    )


def _ranks_of(split: zpartition.ModelParallelGroup) -> ProcessGroup:
    """Those that hold the other parts; None as their group is the default one."""
    group = split.group or dist.group.WORLD
    assert group is not None
    return group


def _fixed(groups: zcomm.Groups, by: str) -> LaidOut:
    """All axes are settled; experts are shared out as the config says."""

    def make(degrees: zcomm.Degrees) -> zcomm.Groups:
        return attrs.evolve(groups, expert=degrees.expert)  # what was given may be another engine's

    degrees = {axis: len(groups.ranks(axis)) for axis in _AXES}
    return LaidOut(make, groups.table.numel(), degrees, by, groups.world)


def _of_mpu(mpu: Any) -> zcomm.Groups:
    """One that names replicas alone is enough where nothing is split."""
    if isinstance(mpu, zcomm.Groups):
        return mpu
    sizes = {name: getattr(mpu, name, lambda: 1)() for name in _SIZES}
    has_tensor = hasattr(mpu, "get_model_parallel_group")
    for name, size in sizes.items():
        if size != 1 and not (has_tensor and _SIZES[name] == "tensor"):
            raise ValueError(
                f"mpu.{name}() is {size}: data-parallel and model-parallel (tensor) groups are read of an mpu, so it "
                f"must be 1. Give mesh= with an axis {_SIZES[name]!r} of {size} ranks instead."
            )
    if has_tensor:
        return zcomm.Groups.from_mpu(mpu)
    group = mpu.get_data_parallel_group()
    ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return zcomm.Groups(("shard",), torch.tensor(ranks), rank, given={ranks: group})
