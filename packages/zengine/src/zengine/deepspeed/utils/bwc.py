"""`deepspeed.utils.bwc`: sizes, ranks and groups of an `mpu`, whichever names it has for them.

Newest names first: Megatron's, those of DeepSpeed's pipelines, Megatron's former ones.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "bwc_pipeline_parallel_group",
    "bwc_pipeline_parallel_world_size",
    "bwc_tensor_model_parallel_group",
    "bwc_tensor_model_parallel_rank",
    "bwc_tensor_model_parallel_world_size",
]

_TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")
_PIPELINE = ("pipeline_model_parallel", "pipe_parallel")


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Return the rank in the tensor-parallel group; 0 without an mpu."""
    return 0 if mpu is None else int(_ask(mpu, _TENSOR, "rank"))


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Return the size of the tensor-parallel group; 1 without an mpu."""
    return 1 if mpu is None else int(_ask(mpu, _TENSOR, "world_size"))


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Return the tensor-parallel group; None without an mpu."""
    return None if mpu is None else _ask(mpu, _TENSOR, "group")


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of pipeline stages; 1 without an mpu, or if it has no pipelines."""
    known = any(hasattr(mpu, f"get_{kind}_world_size") for kind in _PIPELINE)
    return int(_ask(mpu, _PIPELINE, "world_size")) if known else 1


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """Return the group of the pipeline stages; None without an mpu."""
    return None if mpu is None else _ask(mpu, _PIPELINE, "group")


def _ask(mpu: Any, kinds: tuple[str, ...], what: str) -> Any:
    names = [f"get_{kind}_{what}" for kind in kinds]
    for name in names:
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    raise AttributeError(f"{type(mpu).__name__}, passed as mpu, has none of the methods {', '.join(names)}; add one.")
