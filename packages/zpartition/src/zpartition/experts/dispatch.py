"""The way of tokens to their experts and back.

A choice (token, slot) that was kept becomes a row.  Rows are sorted by expert, so what goes to a rank is one slice,
with a run of rows for each of its experts.  `zcomm.collect_runs` sends runs of uneven length: nothing is padded to a
capacity, what was dropped does not travel, and what arrives lies by expert whoever sent it.  The ranks tell each
other their counts first (ranks x experts numbers), after which every rank knows who sends what, and forward and
backward of the layer need no further word.

Backward goes the same way in the other direction.  Rows and gradients of a token are added up in the order of its
choices: no atomics, so the result is the same every time.

Rejected: one-hot products of shape (tokens, experts, capacity), which cost more than the experts do; capacity as the
size of messages, which sends air.
"""

from __future__ import annotations

from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.autograd import Function

import zcomm
from zpartition.cells import Cell

__all__ = ["Shipment"]

Runs = tuple[tuple[tuple[int, ...], ...], ...]  # [from][to][expert of that rank]: rows


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
        return rows if self.deal.size == 1 else _apply(_Collected, rows, self._runs(), self.deal)

    def fetch(self, y: Tensor, weights: Tensor) -> Tensor:
        """Rows of this rank's experts, as `send` gave them -> (tokens, width): sums by `weights`, (tokens, k)."""
        y = y if self.deal.size == 1 else _apply(_Returned, y, self._runs(), self.deal)
        return _apply(_Sum, y, weights.to(y.dtype), self.rows)

    def _runs(self) -> Runs:
        """[from][to][expert of that rank]: rows."""
        starts = range(0, len(self.table[0]), self.num_local)
        return tuple(tuple(row[at : at + self.num_local] for at in starts) for row in self.table)


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


class _Sum(Function):
    """The weighted sum of each token's rows; nothing of what was dropped."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, rows)
        placed = _placed(y, rows, weights.numel()).view(*weights.shape, y.shape[1])
        if weights.shape[1] == 1:
            return placed[:, 0].mul_(weights)
        total = placed[:, 0] * weights[:, :1]
        for slot in range(1, weights.shape[1]):
            total.addcmul_(placed[:, slot], weights[:, slot : slot + 1])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, weights, rows = ctx.saved_tensors
        k = weights.shape[1]
        grads = grad.index_select(0, rows if k == 1 else rows.div(k, rounding_mode="floor"))
        grad_weights = None
        if ctx.needs_input_grad[1]:
            grad_weights = _placed((grads * y).sum(dim=1, keepdim=True), rows, weights.numel()).view_as(weights)
        return grads.mul_(weights.reshape(-1, 1)[rows]), grad_weights, None


class _Collected(Function):
    """Rows at the ranks of their experts, by expert; gradients go back where the rows came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, runs: Runs, deal: Cell) -> Tensor:
        ctx.runs, ctx.deal = runs, deal
        return zcomm.collect_runs(rows.contiguous(), runs, deal.group, label="tokens to experts")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = zcomm.return_runs(grad.contiguous(), ctx.runs, ctx.deal.group, label="gradients of tokens")
        return grad, None, None


class _Returned(Function):
    """Rows back at the ranks that sent them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, runs: Runs, deal: Cell) -> Tensor:
        ctx.runs, ctx.deal = runs, deal
        return zcomm.return_runs(rows.contiguous(), runs, deal.group, label="experts to tokens")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = zcomm.collect_runs(grad.contiguous(), ctx.runs, ctx.deal.group, label="gradients to experts")
        return grad, None, None


def _placed(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """(num_rows, width), `values` at `rows`, each of which comes once, and zeros elsewhere."""
    make = values.new_empty if rows.numel() == num_rows else values.new_zeros
    return make(num_rows, values.shape[1]).index_copy_(0, rows, values)
