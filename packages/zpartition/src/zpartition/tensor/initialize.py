"""`tp_model_init`: a tensor-parallel model in one call, with DeepSpeed's name and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.tensor.infer_plan import infer_verified_plan
from zpartition.tensor.parallelize import parallelize
from zpartition.tensor.plan import TensorPlan
from zpartition.tensor.read import read_layer_specs, read_tp_plan

__all__ = ["tp_model_init"]


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: TensorPlan | Mapping[str, Any] | None = None,
    *,
    inputs: tuple[Any, ...] | Mapping[str, Any] = (),
) -> nn.Module:
    """Split `model` in place over runs of `tp_size` consecutive ranks of the world, and return it.

    config: a plan, or DeepSpeed's `partition_config`.  Default: the model's own `tp_plan` if it has one (Hugging
        Face); else a plan is inferred and verified with `inputs`, positional or by name (Hugging Face models provide
        some).
    dtype: dtype of the weights from now on.
    Data-parallel ranks are those at the same place in all runs: `zcomm.strided_group(tp_size)`.

    Raises:
        ValueError: `tp_size` does not divide the number of ranks, or the plan does not fit the model.
    """
    group = zcomm.consecutive_group(tp_size)
    parallelize(model, _plan(model, config, inputs, group), group)
    return model if dtype is None else model.to(dtype)


def _plan(
    model: nn.Module,
    config: TensorPlan | Mapping[str, Any] | None,
    inputs: tuple[Any, ...] | Mapping[str, Any],
    group: ProcessGroup | None,
) -> TensorPlan:
    if isinstance(config, TensorPlan):
        return config
    if config and config.get("layer_specs"):
        return read_layer_specs(config, model)
    own = getattr(model, "tp_plan", None)
    if own and any("row" in style and "embedding" not in style for style in own.values()):  # not of the head alone
        return read_tp_plan(own, model)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    return infer_verified_plan(model, group, *args, kwargs=kwargs)
