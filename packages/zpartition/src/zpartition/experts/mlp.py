"""The usual expert, two linear layers with an activation between them, and the grouped products that compute many.

`ExpertMLP` is an ordinary module that is one expert.  A layer of experts stacks the weights of all experts and
computes them by grouped products (`forward_rows`), without a loop over modules.

Rows are sorted by expert, so the rows of an expert and its output are contiguous slices: `mm` into the output needs
neither copies nor padding.  On supported GPUs torch has one kernel for all slices (`_compat.grouped_mm`); elsewhere a
loop over this rank's experts, whose products are large, is as fast.  On a CPU their sizes are rounded
(row_padding.py).

An expert without rows writes nothing, and its gradient is zero rather than missing: all ranks must send the same
messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from zpartition import _compat
from zpartition.experts.row_padding import RowPadding, round_total

__all__ = ["ExpertMLP", "add_rows_bias", "grouped_linear", "runs"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": F.gelu,
}

_GATED = ("swiglu", "geglu")


@final
class ExpertMLP(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) where `activation` is swiglu or geglu (Shazeer 2020)."""

    def __init__(self, hidden_size: int, inner_size: int, activation: str = "swiglu", *, bias: bool = False) -> None:
        """Raise ValueError for an unknown activation."""
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}.")
        self.activation = activation
        self.gate = nn.Linear(hidden_size, inner_size, bias=bias) if activation in _GATED else None
        self.up = nn.Linear(hidden_size, inner_size, bias=bias)
        self.down = nn.Linear(inner_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        weights = {name: param[None] for name, param in self.named_parameters()}
        rows = x.reshape(-1, x.shape[-1])
        return self._compute(weights, rows, [rows.shape[0]], rows.shape[0]).view(x.shape)

    def forward_rows(self, weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute the rows of several experts.

        weights: by the names here, each with the experts in front.
        rows: (rows, hidden), sorted by expert.
        """
        padding = RowPadding.choose(rows, counts, weights["up.weight"][0].numel())
        y = self._compute(weights, padding.spread(rows), padding.padded, round_total(rows, padding.padded))
        return padding.collect(y)

    def _compute(self, weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int], num_rows: int) -> Tensor:
        """Compute `rows`; the activation runs on `num_rows`, the last ones zero but for biases."""
        act = _ACTIVATIONS[self.activation]
        inner = _linear("up", weights, rows, counts, num_rows)
        inner = act(inner) if self.gate is None else act(_linear("gate", weights, rows, counts, num_rows)) * inner
        return _linear("down", weights, inner, counts, sum(counts))

    def split_dims(self) -> dict[str, int]:
        """Dimension of each weight that tensor ranks split; a bias behind the sum is whole, and not listed."""
        first = [name for name, _ in self.named_parameters() if not name.startswith("down.")]
        return {**dict.fromkeys(first, 0), "down.weight": 1}


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Sequence[int], bias: Tensor | None = None, num_rows: int | None = None
) -> Tensor:
    """Multiply the rows of each expert by its weight.

    x: (rows, in), sorted by expert; rows behind those of the experts are not read.
    weight: (experts, out, in), of the same dtype.
    counts: rows of each expert.
    bias: (experts, out).
    num_rows: rows of the result, by default those of the experts; rows behind them are zero.
    Returns (num_rows, out).
    """
    total = sum(counts)
    num_rows = total if num_rows is None else num_rows
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if len(x) == total == num_rows and _compat.has_grouped_mm(x, weight):
        ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=x.device)
        y = _compat.grouped_mm(x, weight.transpose(1, 2), ends)
    else:
        y = _GroupedLinear.apply(x, weight, tuple(counts), num_rows)  # type: ignore[no-untyped-call]
    return y if bias is None else y + add_rows_bias(bias, counts, num_rows - total)


def add_rows_bias(bias: Tensor, counts: Sequence[int], num_zeros: int = 0) -> Tensor:
    """(rows, out): the bias of each row's expert, then `num_zeros` rows of zeros."""
    rows = [part.expand(count, -1) for part, count in zip(bias.unbind(), counts)]
    return torch.cat([*rows, bias.new_zeros(num_zeros, bias.shape[1])] if num_zeros else rows)


def runs(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield (expert, its rows) for experts that have rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _linear(name: str, weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int], num_rows: int) -> Tensor:
    return grouped_linear(rows, weights[f"{name}.weight"], counts, weights.get(f"{name}.bias"), num_rows)


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...], num_rows: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        y = x.new_empty(num_rows, weight.shape[1])
        y[sum(counts) :] = 0
        for expert, rows in runs(counts):
            torch.mm(x[rows], weight[expert].t(), out=y[rows])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        if grad_x is not None:
            grad_x[sum(ctx.counts) :] = 0
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
        return grad_x, grad_weight, None, None
