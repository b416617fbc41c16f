"""Global addresses: the part of a tensor that a rank holds.

`box` is the hyper-rectangle of the global tensor that this tensor- or expert-parallel rank holds; `span` is the
interval of the flattened box that this ZeRO rank holds.  The address alone maps any saved tensor onto any live one,
so checkpoints need no converter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

Box = tuple[tuple[int, int], ...]  # (lo, hi) for each dimension


@attrs.frozen
class Address:
    """Position of one tensor's memory in its global tensor: boxes of it, concatenated along dim 0.

    There is almost always one box, and several where a weight holds fused parts ([q; k; v]) and a rank has some
    rows of each.  Model-parallel ranks may hold the same elements: these are numbered copies, and copy 0 counts
    where something is summed over all ranks.
    """

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    num_copies: int = 1  # over model-parallel ranks, not over the ranks of one partition
    copy: int = 0  # index of this one

    @classmethod
    def whole(cls, shape: tuple[int, ...] | torch.Size, num_copies: int = 1, copy: int = 0) -> Address:
        """Address of an unsplit tensor of `shape`."""
        return _whole(tuple(shape), num_copies, copy)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local memory."""
        if not self.global_shape:
            return ()
        rows = sum(box[0][1] - box[0][0] for box in self.boxes)
        return rows, *(hi - lo for lo, hi in self.boxes[0][1:])

    @property
    def is_elsewhere(self) -> bool:
        """True if this rank holds nothing of a tensor that has elements (an expert of another rank)."""
        return not torch.Size(self.shape).numel() and torch.Size(self.global_shape).numel() > 0

    def parts(self, span: tuple[int, int]) -> Iterator[tuple[Box, tuple[int, int], slice]]:
        """Yield (box, span of the flattened box, slice of `span`) for elements `span` of the flattened memory."""
        start = 0
        for box in self.boxes:
            stop = start + math.prod(hi - lo for lo, hi in box)
            lo, hi = max(start, span[0]), min(stop, span[1])
            if lo < hi or (start == 0 and span[0] == span[1] == 0 and not self.is_elsewhere):
                yield box, (lo - start, max(lo, hi) - start), slice(lo - span[0], max(lo, hi) - span[0])
            start = stop


def cut(
    kind: Callable[..., Any], name: str, address: Address, span: tuple[int, int], content: Callable[[slice], Any]
) -> Iterator[Any]:
    """Yield a Shard or LazyShard (`kind`) for each box that elements `span` of `name` lie in.

    `content(part)` returns the content of a shard: elements `part` of those in `span`.
    """
    for box, inside, part in address.parts(span):
        yield kind(name, address.global_shape, box, inside, content(part))


@attrs.frozen(eq=False)
class Shard:
    """`tensor` is 1-D and contiguous, and holds elements [span) of the flattened `box` of tensor `name`."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    span: tuple[int, int]  # [lo, hi) of the flattened box
    tensor: torch.Tensor  # (span length,), live memory: copying into it loads the tensor

    def renamed(self, name: str) -> Shard:
        """The same memory under another name."""
        return Shard(name, self.global_shape, self.box, self.span, self.tensor)


@attrs.frozen(eq=False)
class LazyShard:
    """A Shard whose values are computed on every access.  It can be saved, but not loaded into.

    Quantized optimizer state takes a quarter of the memory of its values, which are decoded shard by shard.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    span: tuple[int, int]
    read: Callable[[], torch.Tensor]  # returns (span length,), contiguous

    def renamed(self, name: str) -> LazyShard:
        """The same values under another name."""
        return LazyShard(name, self.global_shape, self.box, self.span, self.read)

    @property
    def tensor(self) -> torch.Tensor:
        """Values in new memory, (span length,)."""
        return self.read()


def whole(name: str, tensor: torch.Tensor) -> Shard:
    """Return a tensor that this rank holds entirely as a shard.

    Raises:
        ValueError: `tensor` is not contiguous, so no flat view of its memory exists.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: a shard needs contiguous memory, got strides {tuple(tensor.stride())}")
    flat = tensor.detach().view(-1)
    return Shard(name, tuple(tensor.shape), full_box(tensor.shape), (0, flat.numel()), flat)


@functools.lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...], num_copies: int, copy: int) -> Address:
    """Return a value that parameters of one shape share: models have many parameters and few shapes."""
    return Address(shape, (full_box(shape),), num_copies, copy)


def full_box(shape: tuple[int, ...] | torch.Size) -> Box:
    """Return the box that covers all of `shape`."""
    return tuple((0, size) for size in shape)
