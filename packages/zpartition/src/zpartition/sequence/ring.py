"""Ring attention: keys and values go round, so that no rank ever has more than its own and one other's.

For sequences over more ranks than there are heads, or longer than a rank can hold for even one head (Liu et al.
2023). In each of `size` rounds a rank lets its queries look at the keys that have just come by, merges what it finds
by the log-sum-exp of both parts (blocks.py), and the keys move on while it computes.  Backward is a second turn:
probabilities are computed again from the final lse, and the gradients of keys and values travel along with them until
they are home.

    kept from forward to backward     query, key, value, output and one lse a query: O(tokens of a rank)
    sent by a rank, forward           (size - 1) times its keys and values; backward twice that and once more

Causal rings want `Order.ZIGZAG` (splits.py), in which every rank has equally much to do in every round.

Rejected: gathering all keys (O(sequence) memory); keeping the probabilities.
"""

from __future__ import annotations

from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

import zcomm
from zpartition.cells import Cell
from zpartition.sequence.blocks import Block, attend, attend_backward, merge
from zpartition.sequence.passing import NOTHING_UNDER_WAY, hand_on
from zpartition.sequence.splits import Order, Visit, visit
from zpartition.sequence.streams import drawn_seed

__all__ = ["ring_attention"]

Keys = tuple[Tensor, ...]  # keys and values of one rank

_BLOCK_STRIDE = 1 << 40  # between the seeds of blocks; inside a block they differ by the query


@final
@attrs.frozen(eq=False)
class Ring:
    """What all rounds of one attention have in common."""

    cell: Cell
    order: Order
    is_causal: bool
    scale: float
    segments: Tensor | None  # (size, batch, tokens): of all ranks
    dropout: float
    seed: int  # of this rank

    def source(self, round_: int) -> int:
        """Whose keys are here."""
        return (self.cell.rank - round_) % self.cell.size

    def visit(self, round_: int, num_tokens: int) -> Visit:
        """Who looks at what of them."""
        return visit(self.order, self.cell.rank, self.source(round_), num_tokens, is_causal=self.is_causal)

    def block(self, round_: int, seen: Visit) -> Block:
        """How."""
        source, mine = self.source(round_), self.segments
        return Block(
            scale=self.scale,
            is_causal=seen.is_causal,
            query_segments=None if mine is None else mine[self.cell.rank][:, seen.query],
            key_segments=None if mine is None else mine[source][:, seen.key],
            dropout=self.dropout,
            seed=self.seed + source * _BLOCK_STRIDE,
        )


@final
@attrs.frozen(eq=False)
class Saved:
    """What backward starts from; of this rank's tokens."""

    grad: Tensor  # of `out`
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor  # (batch, heads, tokens)

    def backward(self, keys: Keys, ring: Ring, round_: int, seen: Visit) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values through those that meet in this round."""
        grad, q, out, lse = (each[:, :, seen.query] for each in (self.grad, self.q, self.out, self.lse))
        k, v = (each[:, :, seen.key] for each in keys)
        return attend_backward(grad, (q, k, v, out, lse), ring.block(round_, seen))


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        out, lse = _forward(q, k, v, ring)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_backward(Saved(grad.contiguous(), *ctx.saved_tensors), ctx.ring), None


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: ProcessGroup | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    order: Order = Order.ZIGZAG,
    segments: Tensor | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention over a sequence of which each rank of `group` has equally many tokens.

    query: (batch, heads, tokens of this rank, width); key, value: the same with as many heads or a divisor of them.
    order: how `Split` shared the tokens out.  It decides nothing where the attention is not causal.
    segments: (batch, tokens of this rank) whole numbers; tokens see those of equal number only (packed documents;
        padding has one of its own).

    Differentiable once; collective of the group.  In float32 it differs from one process by a few units in the last
    place of the largest value.

    Raises:
        ValueError: shapes do not fit together, with the numbers, before any message.
    """
    _check(query, key, value, order, segments, is_causal)
    cell = Cell.of(group)
    ring = Ring(
        cell=cell,
        order=order,
        is_causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        segments=None if segments is None else _of_all(segments, cell),
        dropout=dropout_p,
        seed=drawn_seed(cell.rank) if dropout_p else 0,
    )
    if torch.compiler.is_compiling():  # a graph ends here: see ulysses.py
        apart = torch.compiler.disable(_RingAttention.apply)  # type: ignore[no-untyped-call]
        out: Tensor = apart(query, key, value, ring)
        return out
    attended: Tensor = _RingAttention.apply(query, key, value, ring)  # type: ignore[no-untyped-call]
    return attended


def _forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """(output as q, lse): one turn of the keys."""
    size = ring.cell.size
    here: Keys = (k, v)
    out, lse = torch.empty(0), torch.empty(0)
    for round_ in range(size):
        under_way = hand_on(here, ring.cell) if round_ + 1 < size else NOTHING_UNDER_WAY
        if seen := ring.visit(round_, q.shape[2]):
            part, part_lse = attend(
                q[:, :, seen.query], here[0][:, :, seen.key], here[1][:, :, seen.key], ring.block(round_, seen)
            )
            if round_ == 0:  # the own keys, which all queries look at
                out, lse = part.to(part_lse.dtype), part_lse
            else:
                merge(out[:, :, seen.query], lse[:, :, seen.query], part, part_lse)
        here = under_way.wait()
    return out.to(q.dtype), lse


def _backward(saved: Saved, ring: Ring) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k, v: another turn of the keys, followed by what their gradients are so far."""
    q, wide = saved.q, saved.lse.dtype
    here: Keys = (saved.k, saved.v)
    sums: Keys = ()
    dq = torch.zeros_like(q, dtype=wide)
    for round_ in range(ring.cell.size):
        is_last = round_ + 1 == ring.cell.size
        leaving = sums if is_last else (*sums, *here)  # the sums belong to the keys of the round before
        under_way = hand_on(leaving, ring.cell) if leaving else NOTHING_UNDER_WAY
        seen = ring.visit(round_, q.shape[2])
        parts = saved.backward(here, ring, round_, seen) if seen else ()
        arrived = under_way.wait()
        sums = arrived[:2] if round_ else tuple(torch.zeros_like(each, dtype=wide) for each in here)
        here = arrived[2:] if round_ else arrived
        if parts:
            dq[:, :, seen.query] += parts[0]
            for total, part in zip(sums, parts[1:]):
                total[:, :, seen.key] += part
    dk, dv = hand_on(sums, ring.cell).wait()
    return dq.to(q.dtype), dk.to(saved.k.dtype), dv.to(saved.v.dtype)


def _of_all(segments: Tensor, cell: Cell) -> Tensor:
    """(size, batch, tokens)."""
    found = segments.new_empty(cell.size, *segments.shape)
    zcomm.all_gather(found.view(-1), segments.contiguous().view(-1), cell.group, label="segments")
    return found


def _check(query: Tensor, key: Tensor, value: Tensor, order: Order, segments: Tensor | None, is_causal: bool) -> None:
    """ValueError if these do not fit together."""
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"{shapes}: a ring takes (batch, heads, tokens, width).")
    if query.shape[1] % key.shape[1] or key.shape[1:3] != value.shape[1:3]:
        raise ValueError(
            f"{shapes}: key and value need equally many heads and tokens, and the query a multiple of their heads."
        )
    if is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(f"{shapes}: a causal ring needs as many keys as queries.")
    if is_causal and order is Order.ZIGZAG and query.shape[2] % 2:
        raise ValueError(
            f"{shapes}: in a zigzag each rank has an early and a late run of equal length, which {query.shape[2]} "
            "tokens are not. Pad the sequence, or share it out with Order.CONTIGUOUS and say so here."
        )
    if segments is not None and segments.shape != (query.shape[0], query.shape[2]):
        raise ValueError(
            f"segments of shape {list(segments.shape)} do not say one number for each of "
            f"{[query.shape[0], query.shape[2]]} tokens, as queries have them."
        )
