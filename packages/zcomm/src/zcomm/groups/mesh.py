"""Named axes over the ranks, on torch's DeviceMesh.

    mesh = make_mesh(replicate=2, shard=-1)      # 8 ranks: 2 x 4
    zcomm.reduce_scatter(out, flat, axis_group(mesh, "shard"))

The mesh is torch's own, so FSDP2, DTensor and pipelining accept it.  This module adds keyword axes, one inferred
size, and errors that print the equation or list the names.  A mesh has axes; a tensor has dims.
"""

from __future__ import annotations

import math

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["axis_group", "axis_rank", "axis_size", "make_mesh"]


def make_mesh(device_type: str = "cpu", **axes: int) -> DeviceMesh:
    """Make a mesh over all ranks, `axes` in order from slowest to fastest; one size may be -1 and is inferred.

    device_type: "cpu" or "cuda", the device of the tensors to communicate.  A collective: every rank must call.
    Raises ValueError if the sizes do not multiply to the world size, RuntimeError before `zcomm.init()`.

    >>> import zcomm
    >>> world = zcomm.init(device="cpu")
    >>> mesh = zcomm.make_mesh(replicate=1, shard=-1)
    >>> zcomm.axis_size(mesh, "shard")
    1
    >>> world.close()
    """
    if not dist.is_initialized():
        raise RuntimeError("make_mesh needs a world: call zcomm.init() first (alone, it makes a world of one).")
    sizes = resolve_sizes(axes, dist.get_world_size())
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def resolve_sizes(axes: dict[str, int], world_size: int) -> dict[str, int]:
    """Fill in -1.  Pure.  Raises ValueError, printing the equation, if the sizes do not fit."""
    if not axes:
        raise ValueError("A mesh needs at least one axis, for example make_mesh(replicate=1, shard=-1).")
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(f"mesh axis {name}={size!r} must be a positive whole number, or -1 to infer it.")
    equation = " x ".join(f"{name}={size}" for name, size in axes.items())
    inferred = [name for name, size in axes.items() if size == -1]
    known = math.prod(size for size in axes.values() if size != -1)
    if len(inferred) > 1:
        raise ValueError(f"mesh {equation}: only one axis may be -1, got {' and '.join(inferred)}.")
    if world_size % known or (not inferred and known != world_size):
        demand = f"{known} must divide" if inferred else f"{known} is not"
        raise ValueError(
            f"mesh {equation} does not hold: {demand} the world size {world_size}. "
            "Change a size, let one axis be inferred with -1, or start another number of processes."
        )
    return {name: world_size // known if size == -1 else size for name, size in axes.items()}


def axis_group(mesh: DeviceMesh, axis: str) -> ProcessGroup:
    """Group of the ranks that differ from this one only along `axis`.  Raises ValueError for an unknown axis."""
    _dim(mesh, axis)
    return mesh.get_group(axis)


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Number of ranks along `axis`.  Raises ValueError for an unknown axis."""
    return mesh.size(_dim(mesh, axis))


def axis_rank(mesh: DeviceMesh, axis: str) -> int:
    """Index of this rank along `axis`, from 0.  Raises ValueError for an unknown axis."""
    _dim(mesh, axis)
    return mesh.get_local_rank(axis)


def _dim(mesh: DeviceMesh, axis: str) -> int:
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise ValueError(f"The mesh has no axis {axis!r}; its axes: {', '.join(map(repr, names)) or 'none named'}.")
    return names.index(axis)
