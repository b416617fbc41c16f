"""`deepspeed.checkpoint.universal_checkpoint`: a parameter's states from a universal checkpoint."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

import zckpt
from zckpt.interchange import read_torch_file
from zengine.deepspeed.checkpoint.constants import CAT_DIM, FP32_WEIGHT_KEY, PARAM, PARAM_N_SUB_PARAMS
from zengine.deepspeed.utils.tensor_fragment import safe_set_full_fp32_param, safe_set_full_optimizer_state

__all__ = ["SubparamShape", "enable_universal_checkpoint", "load_hp_checkpoint_state"]


@attrs.define
class SubparamShape:
    """Parameters that hold several, joined along a dim that is split over tensor ranks (for a checkpoint's info)."""

    patterns: list[str]
    shape: tuple[Any, ...]
    partition_dim: int


def enable_universal_checkpoint(param_list: Iterable[Any]) -> None:
    """Give each parameter the method `load_hp_checkpoint_state`.

    The engine needs none: `load_checkpoint` reads universal checkpoints.
    """
    for param in param_list:
        param.load_hp_checkpoint_state = types.MethodType(load_hp_checkpoint_state, param)


def load_hp_checkpoint_state(
    self: Any, folder: str, tp_rank: int, tp_world_size: int, ep_rank: int = 0, ep_size: int = 1
) -> Any:
    """Load master and moments of a parameter of an engine from `zero/<name>`; return its step count, if it is saved.

    tp_rank, tp_world_size: part of the saved tensor, unless it has the parameter's shape.
    ep_rank, ep_size: this rank's experts of a saved stack, unless it has the parameter's shape.

    Raises zckpt.CheckpointError (damaged, or no such folder), zckpt.CheckpointMismatch (another shape).
    """
    step: Any = None
    shape = tuple(getattr(self, "ds_shape", self.shape))
    names = sorted(name for name in os.listdir(folder) if name.endswith(".pt"))
    parts: dict[str, Tensor] = {}
    for key in (name.removesuffix(".pt") for name in names):
        content = read_torch_file(os.path.join(folder, f"{key}.pt"))
        if key == "step":
            step = content
            continue
        value = content[PARAM] if isinstance(content, dict) else content
        if tuple(value.shape) != shape and ep_size > 1:
            value = value.chunk(ep_size)[ep_rank]
        if tuple(value.shape) != shape and tp_world_size > 1:
            options = content if isinstance(content, dict) else {}
            dim, count = options.get(CAT_DIM, 0), options.get(PARAM_N_SUB_PARAMS, 1)
            value = torch.cat([part.chunk(tp_world_size, dim)[tp_rank] for part in value.chunk(count, dim)], dim)
        if value.numel() != math.prod(shape):
            raise zckpt.CheckpointMismatch(
                f"{os.path.join(folder, key)}.pt has shape {tuple(value.shape)}, and the parameter {shape}"
            )
        parts[key] = value.reshape(shape)
    for key, value in parts.items():
        if key == FP32_WEIGHT_KEY:
            safe_set_full_fp32_param(self, value)
        else:
            safe_set_full_optimizer_state(self, value, key)
    return step
