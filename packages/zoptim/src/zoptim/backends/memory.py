"""Memory of tensors: layout, addresses, overlap.

Kernels know addresses and element counts only.  So tensors of one call are dense and of one memory layout, and no
stream reads or writes memory that another one writes.
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from zoptim.backends import native

__all__ = [
    "WrittenRanges",
    "addresses",
    "as_dense",
    "byte_sizes",
    "copy_to",
    "has_layout_of",
    "is_dense",
    "match_layout",
    "memory_view",
]


def copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a CPU tensor to `device` without a wait: torch keeps the pinned memory until it has been read."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a block of memory without gaps, in any order of dims."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def as_dense(tensor: Tensor) -> Tensor:
    """Return `tensor` if it is dense, else a contiguous copy."""
    return tensor if tensor.is_contiguous() or is_dense(tensor) else tensor.contiguous()


def memory_view(tensor: Tensor) -> Tensor:
    """Return a flat view of a dense tensor in memory order, in which blocks of 8-bit codes are counted."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def has_layout_of(tensor: Tensor, like: Tensor) -> bool:
    """Return whether two tensors of one shape order their elements alike in memory."""
    return tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous())


def match_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor` in the memory layout of `like`, copied if it has another one."""
    if has_layout_of(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Return the address of each tensor's first element."""
    return list(map(Tensor.data_ptr, tensors))


def byte_sizes(tensors: Sequence[Tensor]) -> array[int]:
    """Return the size of each tensor in bytes."""
    return array("q", [tensor.numel() * tensor.element_size() for tensor in tensors])


@attrs.define(eq=False)
class WrittenRanges:
    """The memory that a step writes, as sorted ranges, for overlap checks.

    Invariant: ranges are disjoint.
    """

    starts: array[int]  # addresses, ascending
    ends: array[int]

    @classmethod
    def make(cls, lists: Sequence[Sequence[Tensor]], steps: Sequence[Tensor] = ()) -> WrittenRanges | tuple[int, int]:
        """Return the ranges, or (list, position) of a tensor that overlaps another one.

        Empty tensors have no range.  Neighbours in `steps` may be the same tensor: rows that share a count.
        """
        found = []
        for which, tensors in enumerate([*lists, steps]):
            seen = None
            for position, (start, size) in enumerate(zip(addresses(tensors), byte_sizes(tensors))):
                if size and tensors[position] is not seen:
                    found.append((start, start + size, which, position))
                seen = tensors[position] if tensors is steps else None
        found.sort()
        for before, after in itertools.pairwise(found):
            if after[0] < before[1]:
                return after[2:]
        return cls(array("Q", [f[0] for f in found]), array("Q", [f[1] for f in found]))

    def find(self, starts: array[int], sizes: array[int]) -> int | None:
        """Return the index of the first of the ranges (`starts`, `sizes` in bytes) that overlaps a written one."""
        library = native.library()
        if library is not None:
            view = library.ffi.from_buffer
            index = library.lib.zk_find_overlap(
                len(self.starts), view("uint64_t[]", self.starts), view("uint64_t[]", self.ends),
                len(starts), view("uint64_t[]", starts), view("int64_t[]", sizes),
            )  # fmt: skip
            return None if index < 0 else int(index)
        for index, (start, size) in enumerate(zip(starts, sizes)):
            after = bisect.bisect_right(self.ends, start)
            if size and after < len(self.starts) and self.starts[after] < start + size:
                return index
        return None
