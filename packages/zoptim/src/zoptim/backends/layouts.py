"""How the elements of a tensor lie in memory: what kernels, which know addresses only, must agree upon."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["addresses", "dense", "in_layout_of", "in_memory", "is_dense", "is_in_layout_of", "num_bytes"]


def is_dense(tensor: Tensor) -> bool:
    """Return whether its elements lie side by side, in whatever order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def dense(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy, with its elements side by side in any order."""
    return tensor if tensor.is_contiguous() or is_dense(tensor) else tensor.contiguous()


def in_memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order in which they lie, as blocks of 8-bit codes count them; a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_in_layout_of(tensor: Tensor, like: Tensor) -> bool:
    """Return whether element i in memory is the same element of both, which have one shape."""
    return tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous())


def in_layout_of(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` where element i in memory is element i of `like`: itself, or a copy."""
    if is_in_layout_of(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Return where the tensors' elements begin."""
    return list(map(Tensor.data_ptr, tensors))


def num_bytes(tensors: Sequence[Tensor]) -> array[int]:
    """The sizes of the tensors."""
    return array("q", [tensor.numel() * tensor.element_size() for tensor in tensors])
