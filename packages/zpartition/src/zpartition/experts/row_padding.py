"""Rounded row counts: the CPU's kernels are made for few different shapes.

Problem.  In every step an expert has another number of rows.  On a CPU torch computes products of 16-bit dtypes, and
GELU in any dtype, by oneDNN, which makes a kernel for each shape and keeps 1,024 of them twice (torch's wrapper and
oneDNN): half a megabyte for each product, and for each GELU a small block that splits the heap.  A rank of a tiny
model took 1 GB, and a new shape costs 0.15 to 0.3 ms (bench/results/experts.md).

Design.  Counts are rounded up to multiples of a power of two, 1/16 to 1/8 of the mean count: some 20 shapes, and 3
to 6% more rows.  Rows are copied to a buffer with zero rows behind those of each expert, and back at the end
(`RowPadding`).  Zero rows add nothing to a sum.  Where a product is so large that these rows cost more than a kernel,
counts are kept; so are those of float32 and of GPUs.  The rows of the activation are rounded in any dtype, without a
copy (`round_total`).

Rejected: setting the capacities (LRU_CACHE_CAPACITY, ONEDNN_PRIMITIVE_CACHE_CAPACITY): they are read once for the
process, and a capacity below the shapes of a step makes every kernel again in every step (1.9 times the time at 64).
Expert modules of unknown kind, which may look across rows, need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.autograd import Function

__all__ = ["RowPadding", "round_total"]

_LARGE = 2**30  # multiplications of a product, from which on padding costs more than a kernel


def round_total(x: Tensor, counts: Sequence[int]) -> int:
    """Number of rows to compute an activation on: the sum of `counts`, rounded up if `x` is on the CPU."""
    total = sum(counts)
    return _round_up(total, _step(total) // 2) if x.device.type == "cpu" else total


def _step(count: int) -> int:
    """Power of two of 1/16 to 1/8 of `count`; 1 for small ones."""
    return 1 << max(0, count.bit_length() - 4)


def _round_up(count: int, step: int) -> int:
    return -(-count // max(1, step)) * max(1, step)


@final
@attrs.frozen
class RowPadding:
    """Number of rows of each expert, as they are and in the padded buffer."""

    counts: tuple[int, ...]
    padded: tuple[int, ...]  # each at least that of `counts`

    @classmethod
    def choose(cls, x: Tensor, counts: Sequence[int], matrix_numel: int) -> RowPadding:
        """Choose for rows `x`, which autocast may cast, and experts whose largest matrix has `matrix_numel`."""
        if x.device.type != "cpu" or _product_dtype(x) not in (torch.bfloat16, torch.float16):
            return cls(tuple(counts), tuple(counts))
        mean = sum(counts) // len(counts)
        padded = [
            _round_up(count, _step(max(count, mean))) if count * matrix_numel < _LARGE else count for count in counts
        ]
        return cls(tuple(counts), tuple(padded))

    def spread(self, rows: Tensor) -> Tensor:
        """(sum of counts, width) -> (sum of padded, width), with zeros between the experts."""
        return rows if self.counts == self.padded else _move_rows(rows, self.counts, self.padded)

    def collect(self, rows: Tensor) -> Tensor:
        """Inverse of `spread`: drop the padding."""
        return rows if self.counts == self.padded else _move_rows(rows, self.padded, self.counts)


def _product_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def _move_rows(rows: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
    moved: Tensor = _MoveRows.apply(rows, old, new)  # type: ignore[no-untyped-call]
    return moved


class _MoveRows(Function):
    """Move the rows of each expert from runs of `old` lengths to runs of `new` ones; zeros where `new` is longer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor:
        ctx.old, ctx.new = old, new
        moved = rows.new_empty(sum(new), rows.shape[1])
        for source, target in zip(torch.split(rows, list(old)), torch.split(moved, list(new))):
            shared = min(len(source), len(target))
            target[:shared] = source[:shared]
            target[shared:] = 0
        return moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _move_rows(grad, ctx.new, ctx.old), None, None
