"""`deepspeed.checkpoint.utils`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from zengine.deepspeed.checkpoint.constants import (
    MODEL_FILE_PREFIX,
    MODEL_FILE_SUFFIX,
    OPTIM_FILE_SUFFIX,
    ZERO_FILE_PREFIX,
)

__all__ = [
    "clone_tensors_for_torch_save",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
]


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path of DeepSpeed's model states of a model-parallel rank."""
    return os.path.join(base_folder, f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return the path of DeepSpeed's optimizer shard of a rank."""
    name = f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}"
    return os.path.join(base_folder, name)


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Return the path of DeepSpeed's file of a layer ("layer_03") of a pipeline."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a deep copy of dicts, lists and tuples with tensors on `device`, each in a storage of exactly its size.

    A weight is a view of a flat buffer, and torch.save writes whole buffers.  Tied tensors stay tied.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            own = value.detach()
            key = (
                (own.data_ptr(), own.shape, own.stride(), own.dtype, str(own.device)) if own.numel() else (id(value),)
            )
            if key not in copies:
                copies[key] = own.to(device, copy=True).contiguous()
            return copies[key]
        if isinstance(value, dict):
            copy = type(value)()
            copy.update({name: copied(each) for name, each in value.items()})
            return copy
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(copied(each) for each in value)
        return value

    return copied(item)
