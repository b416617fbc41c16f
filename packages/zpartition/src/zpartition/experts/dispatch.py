"""The way of tokens to their experts and back.

A choice (token, slot) that was kept becomes a row.  Rows are sorted by expert, so what goes to a rank is one slice,
and `zcomm.exchange_slices` sends slices of uneven length: nothing is padded to a capacity, and what was dropped does
not travel.  The ranks tell each other their counts first (ranks x experts numbers), after which every rank knows who
sends what, and forward and backward of the layer need no further word.  What arrives comes by source, each part
sorted by expert; one copy makes each expert's rows contiguous.

Backward goes the same way in the other direction.  Gradients of a token's rows are added up in the order of its
choices: no atomics, so the result is the same every time.

Rejected: one-hot products of shape (tokens, experts, capacity), which cost more than the experts do; capacity as the
size of messages, which sends air.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.autograd import Function

import zcomm
from zpartition.cells import Cell

__all__ = ["Shipment"]


@final
@attrs.frozen(eq=False)
class Shipment:
    """Which rows go where; made once for a forward pass, on all ranks of `deal` together."""

    deal: Cell  # the ranks that share out the experts
    rows: Tensor  # (rows,) int64: the choice, token * k + slot, that each row is, sorted by expert
    table: tuple[tuple[int, ...], ...]  # [rank][expert]: rows that each rank has
    num_tokens: int
    k: int

    @classmethod
    def plan(cls, experts: Tensor, kept: Tensor, num_experts: int, deal: Cell) -> Shipment:
        """`experts`, `kept`: (tokens, k), see Routing.  A collective of `deal`: the ranks exchange their counts."""
        target = torch.where(kept, experts, num_experts).reshape(-1)
        order = target.argsort(stable=True)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=target.device)
        counts.scatter_add_(0, target, torch.ones_like(target))
        table = counts[:-1].view(1, -1)
        if deal.size > 1:
            table = counts.new_empty(deal.size, num_experts)
            zcomm.all_gather(table.view(-1), counts[:-1].contiguous(), deal.group, label="tokens for each expert")
        told = tuple(tuple(row) for row in table.tolist())
        return cls(deal, order[: sum(told[deal.rank])], told, *experts.shape)

    @property
    def num_local(self) -> int:
        """Experts of each rank."""
        return len(self.table[0]) // self.deal.size

    @property
    def own(self) -> slice:
        """This rank's experts."""
        return slice(self.deal.rank * self.num_local, (self.deal.rank + 1) * self.num_local)

    @property
    def counts(self) -> list[int]:
        """Rows that each of this rank's experts is given."""
        return [sum(column) for column in zip(*(row[self.own] for row in self.table))]

    def send(self, x: Tensor) -> Tensor:
        """(tokens, width) -> (rows of this rank's experts, width), sorted by expert."""
        rows = _apply(_Pick, x, self.rows, self.k)
        if self.deal.size == 1:
            return rows
        arrived = _apply(_Exchange, rows, self._sent(), self.deal)
        return _apply(_Permuted, arrived, self._by_expert(arrived.device))

    def fetch(self, y: Tensor, weights: Tensor) -> Tensor:
        """Rows of this rank's experts, as `send` gave them -> (tokens, width): sums by `weights`, (tokens, k)."""
        if self.deal.size > 1:
            y = _apply(_Permuted, y, self._by_expert(y.device).argsort())
            received = tuple(zip(*self._sent()))
            y = _apply(_Exchange, y, received, self.deal)
        placed = _apply(_Place, y, self.rows, self.num_tokens * self.k).view(self.num_tokens, self.k, y.shape[1])
        return torch.bmm(weights.to(y.dtype)[:, None], placed)[:, 0]

    def _sent(self) -> tuple[tuple[int, ...], ...]:
        """[from][to]: rows."""
        step, size = self.num_local, self.deal.size
        return tuple(tuple(sum(row[to * step : (to + 1) * step]) for to in range(size)) for row in self.table)

    def _by_expert(self, device: torch.device) -> Tensor:
        """Where each row, in the order of experts, lies among those that arrived in the order of their sources."""
        return _order_by_expert([row[self.own] for row in self.table]).to(device)


def _order_by_expert(table: Sequence[Sequence[int]]) -> Tensor:
    """table: [source][expert] rows.  Indices into [source, expert] order, by [expert, source]: (rows,) int64."""
    lengths = torch.tensor(table)
    starts = lengths.flatten().cumsum(0).view_as(lengths) - lengths
    run = lengths.t().flatten()
    shift = starts.t().flatten() - (run.cumsum(0) - run)  # from where a run comes to lie to where it is
    return torch.arange(int(run.sum())) + shift.repeat_interleave(run)


def _apply(function: type[Function], *args: Any) -> Tensor:
    found: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return found


class _Pick(Function):
    """Rows of tokens; the gradients of a token's rows are added up in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.k, ctx.num_tokens = k, x.shape[0]
        return x.index_select(0, rows if k == 1 else rows.div(k, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        placed = _placed(grad, rows, ctx.num_tokens * ctx.k)
        return (placed if ctx.k == 1 else placed.view(ctx.num_tokens, ctx.k, grad.shape[1]).sum(dim=1)), None, None


class _Place(Function):
    """Rows put where their choices are; zeros for what was dropped."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Tensor, num_choices: int) -> Tensor:
        ctx.save_for_backward(rows)
        return _placed(y, rows, num_choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None


class _Permuted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return _placed(grad, order, grad.shape[0]), None


class _Exchange(Function):
    """Slices of rows to every rank; gradients go back where the rows came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, table: Sequence[Sequence[int]], deal: Cell) -> Tensor:
        ctx.table, ctx.deal = table, deal
        return _exchanged(rows, table, deal, "tokens to experts")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchanged(grad, tuple(zip(*ctx.table)), ctx.deal, "gradients of tokens"), None, None


def _exchanged(rows: Tensor, table: Sequence[Sequence[int]], deal: Cell, label: str) -> Tensor:
    width = rows.shape[1]
    numels = [[count * width for count in row] for row in table]
    flat = zcomm.exchange_slices(rows.contiguous().view(-1), numels, deal.group, label=label)
    return flat.view(-1, width)


def _placed(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """(num_rows, width), `values` at `rows`, each of which comes once, and zeros elsewhere."""
    make = values.new_empty if rows.numel() == num_rows else values.new_zeros
    return make(num_rows, values.shape[1]).index_copy_(0, rows, values)
