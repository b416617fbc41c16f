"""A tensor with its global address.

`box` is the hyper-rectangle of the global tensor that this tensor- or expert-parallel cell holds, `span` the
interval of the flattened box that this ZeRO rank holds.  The address alone says how any saved tensor maps onto
any live one, which is why a checkpoint needs no converter.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch


@attrs.frozen(eq=False)
class Shard:
    """`tensor` is 1-D, contiguous, and holds elements [span) of the flattened `box` of tensor `name`."""

    name: str
    global_shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]  # (lo, hi) for each dimension
    span: tuple[int, int]  # [lo, hi) of the flattened box
    tensor: torch.Tensor  # (span length,), the live memory: reading into it loads it


@attrs.frozen(eq=False)
class LazyShard:
    """A Shard whose values are made when they are asked for, and again the next time: to be saved, not loaded into.

    What an optimizer keeps in codes takes a quarter of the memory that its values would take.
    """

    name: str
    global_shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    span: tuple[int, int]
    read: Callable[[], torch.Tensor]  # makes (span length,), contiguous

    @property
    def tensor(self) -> torch.Tensor:
        """(span length,), new memory every time."""
        return self.read()


def whole(name: str, tensor: torch.Tensor) -> Shard:
    """A tensor that this rank holds entirely; non-contiguous tensors are refused.

    Raises:
        ValueError: `tensor` is not contiguous, so that no flat view of its memory exists.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: a shard needs contiguous memory, got strides {tuple(tensor.stride())}")
    flat = tensor.detach().view(-1)
    return Shard(name, tuple(tensor.shape), full_box(tensor.shape), (0, flat.numel()), flat)


def full_box(shape: tuple[int, ...] | torch.Size) -> tuple[tuple[int, int], ...]:
    """The box that covers all of `shape`."""
    return tuple((0, size) for size in shape)
