"""Weight, gradient and optimizer state of one parameter: zpartition's functions, with DeepSpeed's argument names.

As in DeepSpeed, the getters return None for a frozen parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

import zpartition
from zengine.deepspeed.absent import absent
from zpartition import (
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_local_fp32_param,
    safe_set_local_grad,
)

__all__ = [
    "fragment_address",
    "get_full_hp_grad",
    "get_full_hp_param",
    "get_hp_fragment_mapping",
    "map_to_flat_opt_states",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_full_hp_grad",
    "set_full_hp_param",
    "tensor_fragment",
]

fragment_address = absent("utils.tensor_fragment.fragment_address")
get_hp_fragment_mapping = absent("utils.tensor_fragment.get_hp_fragment_mapping")
map_to_flat_opt_states = absent("utils.tensor_fragment.map_to_flat_opt_states")
tensor_fragment = absent("utils.tensor_fragment.tensor_fragment")


def safe_get_full_fp32_param(param: Parameter) -> Tensor | None:
    """Return the whole weight as the optimizer holds it; collective."""
    return zpartition.safe_get_full_fp32_param(param) if param.requires_grad else None


def safe_get_local_fp32_param(param: Parameter) -> Tensor | None:
    """Return this rank's elements of the weight as the optimizer holds it, flat."""
    return zpartition.safe_get_local_fp32_param(param) if param.requires_grad else None


def safe_get_full_grad(param: Parameter) -> Tensor | None:
    """Return the whole reduced gradient, None before a backward; collective."""
    return zpartition.safe_get_full_grad(param) if param.requires_grad else None


def safe_get_local_grad(param: Parameter) -> Tensor | None:
    """Return this rank's elements of the reduced gradient, flat; None before a backward."""
    return zpartition.safe_get_local_grad(param) if param.requires_grad else None


def safe_get_full_optimizer_state(param: Parameter, optim_state_key: str) -> Tensor | None:
    """Return one whole optimizer state; collective.  Raises ValueError for unknown keys and before the first step."""
    return zpartition.safe_get_full_optimizer_state(param, optim_state_key) if param.requires_grad else None


def safe_set_full_optimizer_state(param: Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set one optimizer state from a whole `value`, equal on all ranks."""
    zpartition.safe_set_full_optimizer_state(param, value, optim_state_key)


def safe_get_local_optimizer_state(param: Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's elements of one optimizer state, flat."""
    return zpartition.safe_get_local_optimizer_state(param, optim_state_key) if param.requires_grad else None


def safe_set_local_optimizer_state(param: Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's elements of one optimizer state."""
    zpartition.safe_set_local_optimizer_state(param, value, optim_state_key)


def safe_update_full_grad_vectorized(
    param_list: Iterable[Parameter], update_func: Callable[[Tensor, Parameter], Tensor]
) -> None:
    """Replace each reduced gradient by `update_func(gradient, parameter)`, both whole; collective."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            with torch.no_grad():
                safe_set_full_grad(param, update_func(gradient, param))


def get_full_hp_param(self: Parameter, optim_state_key: str | None = None) -> Tensor | None:
    """Return the whole master, or the whole optimizer state of a key; collective."""
    if optim_state_key is None:
        return safe_get_full_fp32_param(self)
    return safe_get_full_optimizer_state(self, optim_state_key)


def set_full_hp_param(self: Parameter, value: Tensor, optim_state_key: str | None = None) -> None:
    """Set the master, or the optimizer state of a key, from a whole `value`, equal on all ranks."""
    if optim_state_key is None:
        safe_set_full_fp32_param(self, value)
    else:
        safe_set_full_optimizer_state(self, value, optim_state_key)


get_full_hp_grad = safe_get_full_grad
set_full_hp_grad = safe_set_full_grad
