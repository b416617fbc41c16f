"""`deepspeed.moe.utils`: what there is to say while no model can have an expert-parallel layer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import Parameter

__all__ = ["configure_moe_param_groups", "has_moe_layers", "is_moe_param"]


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """(whether there are expert-parallel layers, how many experts they have): none can be made yet."""
    return False, 0


def is_moe_param(param: Parameter) -> bool:
    """Whether `param` belongs to an expert that other ranks do not have: never."""
    return False


def configure_moe_param_groups(model_parameters: Any) -> list[Any]:
    """The parameters, or groups, as they are: no experts have to be told apart."""
    return list(model_parameters)


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: int = 0) -> list[Any]:
    """The groups as they are: no experts have to be told apart."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
