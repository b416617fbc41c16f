"""How the elements of a tensor lie in memory: what kernels, which know addresses only, must agree upon."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dense", "in_layout_of", "in_memory", "is_dense", "is_in_layout_of"]


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def dense(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy, with its elements side by side in any order."""
    return tensor if tensor.is_contiguous() or is_dense(tensor) else tensor.contiguous()


def in_memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order in which they lie, as blocks of 8-bit codes count them; a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_in_layout_of(tensor: Tensor, like: Tensor) -> bool:
    """Whether element i in memory is the same element of both, which have one shape."""
    return tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous())


def in_layout_of(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` where element i in memory is element i of `like`: itself, or a copy."""
    if is_in_layout_of(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
