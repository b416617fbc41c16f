"""Ring attention: keys and values move around the ring, so that a rank holds at most its own and one other's.

It is for sequences over more ranks than heads, or longer than a rank can hold for a single head (Liu et al. 2023).
In each of `size` rounds a rank's queries attend to the keys that have just arrived, the result is merged by the
log-sum-exp of both parts (blocks.py), and the keys move on during the computation.  Backward is a second turn:
probabilities are recomputed from the final lse, and the gradients of keys and values travel with them until they
return to their rank.

    kept from forward to backward     query, key, value, output and one lse a query: O(tokens of a rank)
    sent by a rank, forward           (size - 1) times its keys and values; backward twice that and once more

All messages of a round are posted together, which NCCL needs where every rank sends and receives.  Received tensors
are new memory, because tensors that are being sent may still be read.

Causal rings should use `Order.ZIGZAG` (splits.py), in which every rank has equal work in every round.

Rejected: gathering all keys (O(sequence) memory); keeping the probabilities.
"""

from __future__ import annotations

from typing import Any, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.sequence.blocks import AttentionBlock, attend, attend_backward, merge
from zpartition.sequence.random_state import draw_rank_seed
from zpartition.sequence.splits import AttentionSlice, Order, attention_slice

__all__ = ["ring_attention"]

Keys = tuple[Tensor, ...]  # keys and values of one rank

_BLOCK_SEED_STRIDE = 1 << 40  # between the seeds of blocks; inside a block they differ by the query


@final
@attrs.frozen(eq=False)
class Ring:
    """Settings that all rounds of one attention share."""

    mp_group: ModelParallelGroup
    order: Order
    is_causal: bool
    scale: float
    segments: Tensor | None  # (size, batch, tokens): of all ranks
    dropout: float
    seed: int  # of this rank

    def source(self, round_: int) -> int:
        """Return the rank whose keys are here."""
        return (self.mp_group.rank - round_) % self.mp_group.size

    def attention_slice(self, round_: int, num_tokens: int) -> AttentionSlice:
        """Return the queries and keys that attend to each other."""
        return attention_slice(
            self.order, self.mp_group.rank, self.source(round_), num_tokens, is_causal=self.is_causal
        )

    def block(self, round_: int, seen: AttentionSlice) -> AttentionBlock:
        """Return the attention block of a round."""
        source, mine = self.source(round_), self.segments
        return AttentionBlock(
            scale=self.scale,
            is_causal=seen.is_causal,
            query_segments=None if mine is None else mine[self.mp_group.rank][:, seen.query],
            key_segments=None if mine is None else mine[source][:, seen.key],
            dropout=self.dropout,
            seed=self.seed + source * _BLOCK_SEED_STRIDE,
        )


@final
@attrs.frozen(eq=False)
class SavedForward:
    """Inputs of backward, for this rank's tokens."""

    grad: Tensor  # of `out`
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor  # (batch, heads, tokens)

    def backward(self, keys: Keys, ring: Ring, round_: int, seen: AttentionSlice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values through this round."""
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
        return *_backward(SavedForward(grad.contiguous(), *ctx.saved_tensors), ctx.ring), None


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
    """Compute torch's scaled_dot_product_attention over a sequence that is split over the ranks of `group`.

    Ring attention (Liu et al. 2023).  Every rank has equally many tokens.

    query: (batch, heads, tokens of this rank, width).
    key, value: the same with as many heads or a divisor of them.
    order: the `Split` order of the tokens; without effect if the attention is not causal.
    segments: (batch, tokens of this rank) integers; tokens attend only to tokens of the same segment (packed
        documents; padding has its own).

    Differentiable once; collective of the group.  In float32 it differs from one process by a few units in the last
    place of the largest value.

    Raises:
        ValueError: shapes do not match, with the numbers, before any message.
    """
    _check(query, key, value, order, segments, is_causal)
    mp_group = ModelParallelGroup.of(group)
    ring = Ring(
        mp_group=mp_group,
        order=order,
        is_causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        segments=None if segments is None else _gather_segments(segments, mp_group),
        dropout=dropout_p,
        seed=draw_rank_seed(mp_group.rank) if dropout_p else 0,
    )
    if torch.compiler.is_compiling():  # a graph ends here: see ulysses.py
        apart = torch.compiler.disable(_RingAttention.apply)  # type: ignore[no-untyped-call]
        out: Tensor = apart(query, key, value, ring)
        return out
    attended: Tensor = _RingAttention.apply(query, key, value, ring)  # type: ignore[no-untyped-call]
    return attended


def _forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Return (output as q, lse): one turn of the keys."""
    size = ring.mp_group.size
    here: Keys = (k, v)
    out, lse = torch.empty(0), torch.empty(0)
    for round_ in range(size):
        pending = ring_exchange(here, ring.mp_group) if round_ + 1 < size else NO_EXCHANGE
        if seen := ring.attention_slice(round_, q.shape[2]):
            part, part_lse = attend(
                q[:, :, seen.query], here[0][:, :, seen.key], here[1][:, :, seen.key], ring.block(round_, seen)
            )
            if round_ == 0:  # this rank's keys, to which all queries attend
                out, lse = part.to(part_lse.dtype), part_lse
            else:
                merge(out[:, :, seen.query], lse[:, :, seen.query], part, part_lse)
        here = pending.wait()
    return out.to(q.dtype), lse


def _backward(saved: SavedForward, ring: Ring) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v: another turn of the keys, followed by their partial gradients."""
    q, wide = saved.q, saved.lse.dtype
    here: Keys = (saved.k, saved.v)
    sums: Keys = ()
    dq = torch.zeros_like(q, dtype=wide)
    for round_ in range(ring.mp_group.size):
        is_last = round_ + 1 == ring.mp_group.size
        leaving = sums if is_last else (*sums, *here)  # the sums belong to the keys of the round before
        pending = ring_exchange(leaving, ring.mp_group) if leaving else NO_EXCHANGE
        seen = ring.attention_slice(round_, q.shape[2])
        parts = saved.backward(here, ring, round_, seen) if seen else ()
        arrived = pending.wait()
        sums = arrived[:2] if round_ else tuple(torch.zeros_like(each, dtype=wide) for each in here)
        here = arrived[2:] if round_ else arrived
        if parts:
            dq[:, :, seen.query] += parts[0]
            for total, part in zip(sums, parts[1:]):
                total[:, :, seen.key] += part
    dk, dv = ring_exchange(sums, ring.mp_group).wait()
    return dq.to(q.dtype), dk.to(saved.k.dtype), dv.to(saved.v.dtype)


def _gather_segments(segments: Tensor, mp_group: ModelParallelGroup) -> Tensor:
    """(size, batch, tokens)."""
    found = segments.new_empty(mp_group.size, *segments.shape)
    zcomm.all_gather(found.view(-1), segments.contiguous().view(-1), mp_group.group, label="segments")
    return found


def _check(query: Tensor, key: Tensor, value: Tensor, order: Order, segments: Tensor | None, is_causal: bool) -> None:
    """Raise ValueError if the shapes do not match."""
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"{shapes}: ring attention takes (batch, heads, tokens, width).")
    if query.shape[1] % key.shape[1] or key.shape[1:3] != value.shape[1:3]:
        raise ValueError(
            f"{shapes}: key and value must have equal heads and tokens, and the query a multiple of their heads."
        )
    if is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(f"{shapes}: causal ring attention needs as many keys as queries.")
    if is_causal and order is Order.ZIGZAG and query.shape[2] % 2:
        raise ValueError(
            f"{shapes}: in zigzag order each rank has two runs of equal length, so {query.shape[2]} tokens must be "
            "even. Pad the sequence, or split it with Order.CONTIGUOUS and pass that order here."
        )
    if segments is not None and segments.shape != (query.shape[0], query.shape[2]):
        raise ValueError(
            f"segments of shape {list(segments.shape)} must have one number for each of the queries' "
            f"{[query.shape[0], query.shape[2]]} tokens."
        )


@final
@attrs.frozen(eq=False)
class PendingExchange:
    """Messages in flight to the next rank and from the previous one."""

    requests: tuple[Any, ...]
    sent: tuple[Tensor, ...]  # kept alive until they are sent
    arriving: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """Return the received tensors, in the order of sending."""
        for request in self.requests:
            request.wait()
        return self.arriving


NO_EXCHANGE = PendingExchange((), (), ())


def ring_exchange(tensors: tuple[Tensor, ...], mp_group: ModelParallelGroup) -> PendingExchange:
    """Start to send `tensors` to the next rank of the group, and to receive as many from the previous one."""
    if mp_group.size == 1:
        return PendingExchange((), (), tensors)
    sent = tuple(tensor.contiguous() for tensor in tensors)
    arriving = tuple(torch.empty_like(tensor) for tensor in sent)
    to, source = (mp_group.rank + 1) % mp_group.size, (mp_group.rank - 1) % mp_group.size
    posted = []
    for out, come in zip(sent, arriving):
        posted.append(dist.P2POp(dist.isend, out, group=mp_group.group, group_peer=to))
        posted.append(dist.P2POp(dist.irecv, come, group=mp_group.group, group_peer=source))
    zcomm.launching("send_receive", mp_group.group)
    return PendingExchange(tuple(dist.batch_isend_irecv(posted)), sent, arriving)
