"""Casts: which tensors of a model are cast, to which dtype, and the casts themselves.

[Note: buffers are not rounded]  A buffer is state that training cannot recover: running statistics, a codebook, a
routing bias, a counter.  A sum in bf16 stops moving once a term is 256 times smaller than it (the running mean of a
BatchNorm reaches 96.0 instead of 100.3).  So buffers keep their dtype, as in DeepSpeed, unless the user sets one.
They only become wider, with the weights.

torch requires some buffers and the weights beside them to have one dtype:

  - norms with running statistics: the statistics decide, so the weights stay in float32 with them.  torch accepts
    16-bit inputs beside them on every device, but rejects 16-bit weights on a CPU.  FSDP and Apex do the same.
  - spectral norms: two unit vectors that every forward recomputes from the weight, which decides.

Rejected: casting non-persistent buffers (`persistent=False`), mostly rotary frequencies and masks.  Frequencies lose
accuracy in 8 significant bits, and for masks torch raises an error, which `WideBuffers` explains.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zprecision._compat import RunningNorm, spectral_vectors

__all__ = ["cast", "cast_in_place", "is_castable", "paired_dtypes"]

_CASTABLE = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


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


def is_castable(tensor: Tensor) -> bool:
    """True for floating tensors of 16, 32 or 64 bits; 8-bit codes mean nothing in another dtype."""
    return tensor.dtype in _CASTABLE


def paired_dtypes(module: nn.Module, param: torch.dtype, buffer: torch.dtype | None) -> dict[int, torch.dtype]:
    """Map id(tensor) -> dtype for tensors that torch requires in one dtype with others, when weights become `param`.

    buffer: the dtype that the user set for buffers, or None.
    """
    found: dict[int, torch.dtype] = {}
    for child in module.modules():
        if (
            isinstance(child, RunningNorm)
            and isinstance(child.running_mean, Tensor)
            and is_castable(child.running_mean)
        ):
            dtype = _of_norm(buffer or child.running_mean.dtype, param)
            own = (child.weight, child.bias, child.running_mean, child.running_var)
            found.update((id(tensor), dtype) for tensor in own if isinstance(tensor, Tensor))
        found.update((id(vector), param) for vector in spectral_vectors(child))
    return found


def _of_norm(statistics: torch.dtype, param: torch.dtype) -> torch.dtype:
    """Dtype of a norm's weights: a norm takes 16-bit inputs in its own dtype or float32, other inputs in its own."""
    is_narrow = param.itemsize < torch.float32.itemsize
    return torch.float32 if is_narrow and statistics != param else param
