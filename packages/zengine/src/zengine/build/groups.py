"""Process layout: the groups of an engine, from a mesh, an `mpu`, a model that is already split, or the config.

A mesh or an `mpu` fixes all axes, a split model fixes its tensor ranks, and the config places the remaining ranks.
The caller's arguments become a `ProcessLayout`: degrees that `resolve` checks the config against, and a function that
makes the groups once the config is resolved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import zcomm
import zpartition
from zengine.build.expert_parallel import expert_axes
from zengine.build.pipeline import pipeline_axes

__all__ = ["ProcessLayout", "process_layout"]

_AXES = ("pipeline", "replicate", "shard", "sequence", "tensor")
_SIZES = {  # getters of an mpu -> axis
    f"get_{name}_world_size": axis for axis, names in zcomm.MPU_NAMES.items() for name in names
}
_REMEDIES = {
    "tensor": "Give it get_tensor_model_parallel_group() or get_model_parallel_group().",
    "pipeline": "Build the model as a PipelineModule of that many stages without mpu=, or pass mesh= with an axis "
    "'pipeline'.",
    "sequence": "Pass mesh= with an axis 'sequence', or write \"sequence_parallel_size\".",
    "expert": 'Use layers of zpartition.experts, and write "expert_parallel".',
}


@attrs.frozen(eq=False)
class ProcessLayout:
    """Degrees that the caller fixed, and the way to the groups."""

    make: Callable[[zcomm.Degrees], zcomm.Groups]  # from the resolved degrees
    num_ranks: int  # of the engine: a mesh may cover a part of the world
    axes: Mapping[str, int] = attrs.field(factory=dict)  # fixed degrees
    source: str = ""  # the argument that fixes them
    world: Callable[[], ProcessGroup | None] = lambda: None  # group of all ranks of the engine

    @property
    def replicas(self) -> int:
        """Replicas of the model by the fixed degrees."""
        return self.num_ranks // math.prod(self.axes.get(axis, 1) for axis in ("pipeline", "sequence", "tensor"))


def process_layout(mpu: Any, mesh: DeviceMesh | None, model: nn.Module) -> ProcessLayout:
    """Return the process layout of the arguments of `initialize`.

    A collective if there is an mpu, or a mesh with a split model.

    Raises:
        ValueError: both mpu and mesh are given; the mesh has unknown axes; the mpu's groups form no grid; or the
            tensor ranks of a split model are not neighbours.
    """
    if mpu is not None and mesh is not None:
        raise ValueError("initialize() got both mpu= and mesh=: they may place the ranks differently; keep one")
    found = _process_layout(mpu, mesh, model)
    experts = expert_axes(model)
    return (
        attrs.evolve(found, axes={**found.axes, **experts}, source=found.source or "the model") if experts else found
    )


def _process_layout(mpu: Any, mesh: DeviceMesh | None, model: nn.Module) -> ProcessLayout:
    split, stages = zpartition.model_parallel_group_of(model), pipeline_axes(model)
    if mesh is not None or mpu is not None:
        groups = zcomm.Groups.from_mesh(mesh) if mesh is not None else _mpu_groups(mpu)
        groups = groups.split_over(_group_of(split)) if split.size > 1 else groups
        return _fixed_layout(groups, "mesh=" if mpu is None else "mpu=")
    if split.size == 1:
        return ProcessLayout(zcomm.Groups.of, zcomm.group_size(), stages, "the model")
    zpartition.replicas_of(model)  # raises unless tensor ranks are neighbours
    tensor = _group_of(split)

    def make(degrees: zcomm.Degrees) -> zcomm.Groups:
        return zcomm.Groups.of(degrees).split_over(tensor)

    return ProcessLayout(make, zcomm.group_size(), {"tensor": split.size, **stages}, "the model")


def _group_of(split: zpartition.ModelParallelGroup) -> ProcessGroup:
    """Return the process group of tensor ranks; None stands for the default group."""
    group = split.group or dist.group.WORLD
    assert group is not None
    return group


def _fixed_layout(groups: zcomm.Groups, source: str) -> ProcessLayout:
    """Return a layout with all axes fixed but the expert ranks, which the config sets."""

    def make(degrees: zcomm.Degrees) -> zcomm.Groups:
        return attrs.evolve(groups, expert=degrees.expert)  # the groups may be those of another engine

    degrees = {axis: len(groups.ranks(axis)) for axis in _AXES}
    return ProcessLayout(make, groups.table.size, degrees, source, groups.world)


def _mpu_groups(mpu: Any) -> zcomm.Groups:
    """Return the groups of an mpu; one with data-parallel groups alone is enough if nothing is split."""
    if isinstance(mpu, zcomm.Groups):
        return mpu
    sizes = {name: getattr(mpu, name)() for name in _SIZES if hasattr(mpu, name)}
    has_tensor = bool(zcomm.mpu_getter(mpu, "tensor", "group"))
    for name, size in sizes.items():
        axis = _SIZES[name]
        if size > 1 and not (has_tensor and axis == "tensor"):
            raise ValueError(
                f"mpu.{name}() is {size}: only data-parallel and model-parallel (tensor) groups of an mpu are used, "
                f"so it must be 1. {_REMEDIES[axis]}"
            )
    if has_tensor:
        return zcomm.Groups.from_mpu(mpu)
    group = mpu.get_data_parallel_group()
    ranks = tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return zcomm.Groups(("shard",), np.array(ranks), rank, given={ranks: group})
