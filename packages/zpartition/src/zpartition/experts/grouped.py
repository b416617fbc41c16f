"""Grouped products: runs of rows, each times the weight of its expert.

Rows are sorted by expert, so the rows of an expert and its output are contiguous slices: `mm` into the output needs
neither copies nor padding.  On supported GPUs torch has one kernel for all slices (`_compat.grouped_mm`); elsewhere a
loop over this rank's experts, whose products are large, is as fast.

An expert without rows writes nothing, and its gradient is zero rather than missing: all ranks must send the same
messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from zpartition import _compat

__all__ = ["add_rows_bias", "grouped_linear", "runs"]


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """Multiply the rows of each expert by its weight.

    x: (rows, in), sorted by expert.
    weight: (experts, out, in), of the same dtype.
    counts: rows of each expert; they add up to `rows`.
    bias: (experts, out).
    Returns (rows, out).
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if _compat.has_grouped_mm(x, weight):
        ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=x.device)
        y = _compat.grouped_mm(x, weight.transpose(1, 2), ends)
    else:
        y = _GroupedLinear.apply(x, weight, tuple(counts))  # type: ignore[no-untyped-call]
    return y if bias is None else y + add_rows_bias(bias, counts)


def add_rows_bias(bias: Tensor, counts: Sequence[int]) -> Tensor:
    """(rows, out): the bias of each row's expert."""
    return torch.cat([part.expand(count, -1) for part, count in zip(bias.unbind(), counts)])


def runs(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield (expert, its rows) for experts that have rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        y = x.new_empty(x.shape[0], weight.shape[1])
        for expert, rows in runs(counts):
            torch.mm(x[rows], weight[expert].t(), out=y[rows])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad = grad.contiguous()
        for expert, count in enumerate(ctx.counts):
            if grad_weight is not None and not count:
                grad_weight[expert].zero_()
        for expert, rows in runs(ctx.counts):
            if grad_x is not None:
                torch.mm(grad[rows], weight[expert], out=grad_x[rows])
            if grad_weight is not None:
                torch.mm(grad[rows].t(), x[rows], out=grad_weight[expert])
        return grad_x, grad_weight, None
