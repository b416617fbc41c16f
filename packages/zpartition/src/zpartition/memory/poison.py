"""Poison: the value of weights that are not here.  A read of it shows at once instead of being wrong silently."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_poison", "poison_of"]


def poison_of(dtype: torch.dtype) -> float:
    """Return NaN; for integers all bits set, which are NaN as the bytes of a float16, bfloat16 or float32."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return -1 if dtype.is_signed else torch.iinfo(dtype).max


def is_poison(value: Tensor) -> bool:
    """Return whether a tensor of one element is poison.  Waits for its device."""
    found = value.isnan() if value.is_floating_point() else value == poison_of(value.dtype)
    return bool(found)
