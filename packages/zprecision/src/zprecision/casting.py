"""Casts of floating tensors: modules in place, and nested arguments into new containers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

__all__ = ["cast", "cast_in_place"]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with every floating tensor in `dtype`; the input is not modified.

    Descends into lists, tuples (named ones too) and dicts at any depth; other objects are returned unchanged.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, dict):
        same_kind = copy.copy(value)  # keeps an OrderedDict's order and a defaultdict's factory
        for key, item in value.items():  # not update(), which the outputs of Transformers reject
            same_kind[key] = cast(item, dtype)
        return same_kind
    return value


def cast_in_place(tensor: Tensor, dtype: torch.dtype) -> None:
    """Change the dtype of a parameter or buffer, and of its gradient; the object stays the same."""
    if tensor.dtype != dtype:
        tensor.data = tensor.data.to(dtype)
    if tensor.grad is not None and tensor.grad.dtype != dtype:
        tensor.grad = tensor.grad.detach().to(dtype)
