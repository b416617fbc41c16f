"""A tensor with its global address.

`box` is the hyper-rectangle of the global tensor that this tensor- or expert-parallel cell holds, `span` the
interval of the flattened box that this ZeRO rank holds.  The address alone says how any saved tensor maps onto
any live one, which is why a checkpoint needs no converter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

Box = tuple[tuple[int, int], ...]  # (lo, hi) for each dimension


@attrs.frozen
class Address:
    """Where the memory of one tensor lies in its global tensor: boxes of that, one after another along dim 0.

    One box almost always; several where a weight holds fused parts ([q; k; v]) and a rank has some rows of each.
    Ranks of other cells (tensor parallel ones) may hold the very same elements: those are numbered copies, of which
    copy 0 counts where something is summed over all ranks.
    """

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    num_copies: int = 1  # over the cells, not over the ranks of one partition
    copy: int = 0  # which of them this is

    @classmethod
    def whole(cls, shape: tuple[int, ...] | torch.Size, num_copies: int = 1, copy: int = 0) -> Address:
        """All of a tensor of `shape`."""
        return cls(tuple(shape), (full_box(shape),), num_copies, copy)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the memory."""
        if not self.global_shape:
            return ()
        rows = sum(box[0][1] - box[0][0] for box in self.boxes)
        return rows, *(hi - lo for lo, hi in self.boxes[0][1:])

    def parts(self, span: tuple[int, int]) -> Iterator[tuple[Box, tuple[int, int], slice]]:
        """What elements `span` of the flattened memory are: (box, span of the flattened box, slice of the span)."""
        start = 0
        for box in self.boxes:
            stop = start + torch.Size(hi - lo for lo, hi in box).numel()
            lo, hi = max(start, span[0]), min(stop, span[1])
            if lo < hi or (start == 0 and span[0] == span[1] == 0):
                yield box, (lo - start, max(lo, hi) - start), slice(lo - span[0], max(lo, hi) - span[0])
            start = stop


def cut(
    kind: Callable[..., Any], name: str, address: Address, span: tuple[int, int], content: Callable[[slice], Any]
) -> Iterator[Any]:
    """A Shard or LazyShard, `kind`, for each box that elements `span` of `name` lie in.

    `content(part)` gives what a shard holds: elements `part` of those in `span`.
    """
    for box, inside, part in address.parts(span):
        yield kind(name, address.global_shape, box, inside, content(part))


@attrs.frozen(eq=False)
class Shard:
    """`tensor` is 1-D, contiguous, and holds elements [span) of the flattened `box` of tensor `name`."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    span: tuple[int, int]  # [lo, hi) of the flattened box
    tensor: torch.Tensor  # (span length,), the live memory: reading into it loads it


@attrs.frozen(eq=False)
class LazyShard:
    """A Shard whose values are made when they are asked for, and again the next time: to be saved, not loaded into.

    What an optimizer keeps in codes takes a quarter of the memory that its values would take.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
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


def full_box(shape: tuple[int, ...] | torch.Size) -> Box:
    """The box that covers all of `shape`."""
    return tuple((0, size) for size in shape)
