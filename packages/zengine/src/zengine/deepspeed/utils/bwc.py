"""`deepspeed.utils.bwc`: model-parallel groups of an `mpu`, by the names of any release of Megatron-LM."""

from __future__ import annotations

from typing import Any

import zcomm
from zengine.deepspeed.comm.world import get_rank, get_world_size

__all__ = [
    "bwc_pipeline_parallel_group",
    "bwc_pipeline_parallel_world_size",
    "bwc_tensor_model_parallel_group",
    "bwc_tensor_model_parallel_rank",
    "bwc_tensor_model_parallel_world_size",
]


def _call(mpu: Any, axis: str, what: str) -> Any:
    """Return the result of the mpu's getter; None if there is none."""
    getter = zcomm.mpu_getter(mpu, axis, what)
    return getattr(mpu, getter)() if getter else None


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Return the group of the ranks that split the same layers; None without an mpu."""
    return None if mpu is None else _call(mpu, "tensor", "group")


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Return the size of that group; 1 without an mpu."""
    if mpu is None:
        return 1
    size = _call(mpu, "tensor", "world_size")
    group = _call(mpu, "tensor", "group") if size is None else None
    return int(size) if size is not None else 1 if group is None else get_world_size(group)


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Return this rank's index in that group; 0 without an mpu."""
    if mpu is None:
        return 0
    rank = _call(mpu, "tensor", "rank")
    group = _call(mpu, "tensor", "group") if rank is None else None
    return int(rank) if rank is not None else 0 if group is None else get_rank(group)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of pipeline stages; 1 without an mpu, or with one that has none."""
    return 1 if mpu is None else int(_call(mpu, "pipeline", "world_size") or 1)


def bwc_pipeline_parallel_group(mpu: Any) -> Any:
    """Return the group of the pipeline's stages; None if the mpu has none."""
    return _call(mpu, "pipeline", "group")
