"""DeepSpeed's op "utils": the bytes of tensors, and tensors joined into a flat one and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["cast_to_byte_tensor", "flatten", "unflatten"]


def cast_to_byte_tensor(src_tensor: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
    """Return a one-dimensional uint8 view of a contiguous tensor's memory; of several, a list.

    A tensor of at most one byte is returned as it is.
    """
    if not isinstance(src_tensor, Tensor):
        return [_bytes_of(each) for each in src_tensor]
    return _bytes_of(src_tensor)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.nbytes <= 1 else tensor.detach().view(-1).view(torch.uint8)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new one-dimensional tensor with the elements of all; they have one dtype and device."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` with the shapes of `tensors`, in order."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
