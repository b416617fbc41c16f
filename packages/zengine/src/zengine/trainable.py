"""What an optimizer is made over: the parameters of a module, their dtypes, and the names that it has for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zcomm
from zpartition import stages_of

__all__ = ["dtype_of", "dtypes_of", "named", "trainable"]


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """All that can be trained, now or when it is unfrozen."""
    return [param for param in module.parameters() if param.requires_grad or param.is_floating_point()]


def dtypes_of(module: nn.Module) -> dict[torch.dtype, str]:
    """Dtypes of the parameters that are trained, each with the name of one.  A collective of a pipeline's stages."""
    own = {param.dtype: name for name, param in module.named_parameters() if param.requires_grad}
    stages = stages_of(module)
    if stages.size == 1:
        return own
    told = zcomm.exchange({str(dtype).removeprefix("torch."): name for dtype, name in own.items()}, stages.group)
    return {getattr(torch, dtype): name for each in told for dtype, name in each.items()}


def dtype_of(module: nn.Module) -> torch.dtype:
    """Of the first floating parameter, by which DeepSpeed goes too; float32 without one."""
    return next((param.dtype for param in module.parameters() if param.is_floating_point()), torch.float32)


def named(module: nn.Module, parameters: list[Any]) -> list[Any]:
    """The same parameters or groups with the module's names, by which Muon tells embeddings from other matrices.

    All or none: what is not a parameter of the module has no name, and is refused later on.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    groups = [{**item, "params": _listed(item["params"])} if isinstance(item, dict) else item for item in parameters]
    members = [param for item in groups for param in (item["params"] if isinstance(item, dict) else [item])]
    if any(id(param) not in names for param in members):
        return groups

    def with_names(item: Any) -> Any:
        if isinstance(item, dict):
            pairs = [(names[id(param)], param) for param in item["params"]]
            return {**item, "params": pairs, **({} if pairs else {"param_names": []})}  # torch sees no names in []
        return names[id(item)], item

    return [with_names(item) for item in groups]


def _listed(params: Any) -> list[Any]:
    """The members of a group, which may be a single parameter or a generator."""
    return [params] if isinstance(params, Tensor) else list(params)
