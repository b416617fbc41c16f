"""Addresses of DTensors: what FSDP2 and DTensor parallelism hold of a parameter, as a box.

A plain `Shard` placement cuts a dim as torch.chunk does: ceil(size / ranks) for each rank until nothing is left.
Placements on several mesh axes cut one after the other, from the first axis on.  Only attributes are asked for, so
torch.distributed.tensor is imported by whoever has DTensors, and by nobody else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zckpt.errors import CheckpointInputError
from zckpt.format.regions import Box, box_numel, whole_box
from zckpt.format.shard import Shard, whole


def is_dtensor(tensor: object) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor: of a DTensor its local part, else itself."""
    part: Any = tensor.detach()
    local: Tensor = part.to_local() if is_dtensor(part) else part
    return local


def local_shard(name: str, tensor: Tensor, local: Tensor) -> Shard:
    """`local`, any shape, contiguous, as the part of `tensor` that this rank holds."""
    if not is_dtensor(tensor):
        return whole(name, local)
    box = box_of(name, tensor)
    if tuple(local.shape) != tuple(hi - lo for lo, hi in box) and box_numel(box) + local.numel() > 0:
        raise CheckpointInputError(f"{name}: a local part of shape {tuple(local.shape)} where {box} was expected")
    return Shard(name, tuple(tensor.shape), box, (0, box_numel(box)), local.view(-1))


def box_of(name: str, tensor: Any) -> Box:
    """Box that this rank holds.  Raises CheckpointInputError for placements other than Shard and Replicate."""
    box = list(whole_box(tuple(tensor.shape)))
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            raise CheckpointInputError(
                f"{name} is a DTensor with the placement {placement}: only Shard and Replicate have a box. Give its "
                "local part as a Shard with an address, in shards="
            )
        dim = placement.dim % len(box)
        lo, hi = box[dim]
        step = -(-(hi - lo) // tensor.device_mesh.size(axis))
        first = min(lo + step * tensor.device_mesh.get_local_rank(axis), hi)
        box[dim] = (first, min(first + step, hi))
    return tuple(box)
