"""Token dispatch: tokens to the ranks of their experts and back.

Each kept choice (token, slot) becomes a row.  Rows are sorted by expert, so a rank's rows are one slice, with a run
of rows for each of its experts.  `zcomm.all_to_all_ragged_rows` sends runs of uneven length: nothing is padded to a
capacity, dropped tokens are not sent, and rows arrive sorted by expert whichever rank sent them.  The ranks first
exchange counts (ranks x experts numbers), after which every rank knows all sizes, for forward and backward.

Backward sends gradients the opposite way.  Rows and gradients of a token are added in the order of its choices,
without atomics, so the result is deterministic.

Rejected: one-hot products of shape (tokens, experts, capacity), which cost more than the experts do; messages padded
to capacity.
"""

from __future__ import annotations

from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.autograd import Function

import zcomm
from zpartition.layout.model_parallel import ModelParallelGroup

__all__ = ["TokenDispatch"]

Runs = tuple[tuple[tuple[int, ...], ...], ...]  # [from][to][expert of that rank]: rows


@final
@attrs.frozen(eq=False)
class TokenDispatch:
    """Routes of rows, planned once for a forward pass by all ranks of `expert_group`."""

    expert_group: ModelParallelGroup  # the ranks that hold the experts
    rows: Tensor  # (rows,) int64: the choice, token * k + slot, that each row is, sorted by expert
    table: tuple[tuple[int, ...], ...]  # [rank][expert]: rows that each rank has
    num_tokens: int
    k: int

    @classmethod
    def plan(cls, experts: Tensor, kept: Tensor, num_experts: int, expert_group: ModelParallelGroup) -> TokenDispatch:
        """Plan from `experts`, `kept`: (tokens, k), see Routing.  Collective of `expert_group`: exchanges counts."""
        target = torch.where(kept, experts, num_experts).reshape(-1)
        order = target.argsort(stable=True)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=target.device)
        counts.scatter_add_(0, target, torch.ones_like(target))
        table = counts[:-1].view(1, -1)
        if expert_group.size > 1:
            table = counts.new_empty(expert_group.size, num_experts)
            zcomm.all_gather(
                table.view(-1), counts[:-1].contiguous(), expert_group.group, label="tokens for each expert"
            )
        rows = tuple(tuple(row) for row in table.tolist())
        return cls(expert_group, order[: sum(rows[expert_group.rank])], rows, *experts.shape)

    @property
    def num_local(self) -> int:
        """Experts of each rank."""
        return len(self.table[0]) // self.expert_group.size

    @property
    def own(self) -> slice:
        """Experts of this rank."""
        return slice(self.expert_group.rank * self.num_local, (self.expert_group.rank + 1) * self.num_local)

    @property
    def counts(self) -> list[int]:
        """Rows of each of this rank's experts."""
        return [sum(column) for column in zip(*(row[self.own] for row in self.table))]

    def send(self, x: Tensor) -> Tensor:
        """(tokens, width) -> (rows of this rank's experts, width), sorted by expert."""
        rows = _apply(_SelectRows, x, self.rows, self.k)
        return rows if self.expert_group.size == 1 else _apply(_DispatchRows, rows, self._runs(), self.expert_group)

    def combine(self, y: Tensor, weights: Tensor) -> Tensor:
        """Combine outputs for the rows of `send` into (tokens, width): sums weighted by `weights`, (tokens, k)."""
        y = y if self.expert_group.size == 1 else _apply(_ReturnRows, y, self._runs(), self.expert_group)
        return _apply(_WeightedSum, y, weights.to(y.dtype), self.rows)

    def _runs(self) -> Runs:
        """Rows as [from][to][expert of that rank]."""
        starts = range(0, len(self.table[0]), self.num_local)
        return tuple(tuple(row[at : at + self.num_local] for at in starts) for row in self.table)


def _apply(function: type[Function], *args: Any) -> Tensor:
    found: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return found


class _SelectRows(Function):
    """Select rows of tokens; backward adds the gradients of a token's rows in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.k, ctx.num_tokens = k, x.shape[0]
        return x.index_select(0, rows if k == 1 else rows.div(k, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        placed = _scatter_rows(grad, rows, ctx.num_tokens * ctx.k)
        return (placed if ctx.k == 1 else placed.view(ctx.num_tokens, ctx.k, grad.shape[1]).sum(dim=1)), None, None


class _WeightedSum(Function):
    """Sum each token's rows by weight; dropped choices contribute nothing."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, rows)
        placed = _scatter_rows(y, rows, weights.numel()).view(*weights.shape, y.shape[1])
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
            grad_weights = _scatter_rows((grads * y).sum(dim=1, keepdim=True), rows, weights.numel()).view_as(weights)
        return grads.mul_(weights.reshape(-1, 1)[rows]), grad_weights, None


class _DispatchRows(Function):
    """Send rows to the ranks of their experts, sorted by expert; backward returns gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, runs: Runs, expert_group: ModelParallelGroup) -> Tensor:
        ctx.runs, ctx.expert_group = runs, expert_group
        return zcomm.all_to_all_ragged_rows(rows.contiguous(), runs, expert_group.group, label="tokens to experts")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = zcomm.return_ragged_rows(
            grad.contiguous(), ctx.runs, ctx.expert_group.group, label="gradients of tokens"
        )
        return grad, None, None


class _ReturnRows(Function):
    """Return rows to the ranks that sent them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, runs: Runs, expert_group: ModelParallelGroup) -> Tensor:
        ctx.runs, ctx.expert_group = runs, expert_group
        return zcomm.return_ragged_rows(rows.contiguous(), runs, expert_group.group, label="experts to tokens")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = zcomm.all_to_all_ragged_rows(
            grad.contiguous(), ctx.runs, ctx.expert_group.group, label="gradients to experts"
        )
        return grad, None, None


def _scatter_rows(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Build (num_rows, width) with `values` at the distinct `rows`, and zeros elsewhere."""
    make = values.new_empty if rows.numel() == num_rows else values.new_zeros
    return make(num_rows, values.shape[1]).index_copy_(0, rows, values)
