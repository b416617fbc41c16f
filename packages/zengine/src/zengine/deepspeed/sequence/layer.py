"""`deepspeed.sequence.layer`: attention over sequence ranks, and the exchange that it consists of.

    heads = _SeqAllToAll.apply(group, x, 2, 0, 1)      # all tokens of some heads, from some tokens of all heads
    tokens = _SeqAllToAll.apply(group, heads, 0, 2, 1) # and back

Tensors are (batch, tokens, heads, width) with batch_dim_idx=0, or (tokens, batch, heads, width) with 1; scatter_idx
is the dim that is split and gather_idx the one that is joined.  Heads that do not divide are assigned in runs, the
longer ones first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from zengine.deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list
from zengine.deepspeed.moe.sharded_moe import _AllToAll
from zpartition import ModelParallelGroup, sequence

__all__ = ["DistributedAttention", "apply_rotary_pos_emb", "single_all_to_all", "uneven_heads_all2all"]

_HEADS = 2  # dim of the heads


def uneven_heads_all2all(
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: ProcessGroup | None,
    num_kv_heads: int,
) -> Tensor:
    """Exchange heads that need not divide: groups of heads, `num_kv_heads` of them, stay on one rank.

    Raises ValueError for fewer groups than ranks, tokens that do not divide, or another batch_dim_idx.
    """
    if batch_dim_idx not in (0, 1):
        raise ValueError(
            f"batch_dim_idx must be 0 (batch, tokens, ...) or 1 (tokens, batch, ...), got {batch_dim_idx}"
        )
    ranks, to_heads = ModelParallelGroup.of(group), scatter_idx >= _HEADS
    if num_kv_heads < ranks.size:
        raise ValueError(
            f"{num_kv_heads} key-value heads cannot be assigned to {ranks.size} sequence ranks: each needs one"
        )
    tokens_dim = gather_idx if to_heads else scatter_idx
    shares = get_shard_size_list(num_kv_heads, ranks.size, AutoTPMeta(num_kv_heads=num_kv_heads))
    own = num_kv_heads if to_heads else shares[ranks.rank]
    if input.shape[_HEADS] % own:
        raise ValueError(
            f"{input.shape[_HEADS]} heads (dim {_HEADS} of shape {list(input.shape)}) are no multiple of {own} "
            "key-value heads"
        )
    each = input.shape[_HEADS] // own
    starts = [sum(shares[:rank]) * each for rank in range(ranks.size)]
    heads = tuple(range(start, start + share * each) for start, share in zip(starts, shares))
    dims = sequence.Dims(heads=_HEADS, tokens=tokens_dim)
    if not to_heads and input.shape[tokens_dim] % ranks.size:
        raise ValueError(
            f"{input.shape[tokens_dim]} tokens (dim {tokens_dim}) cannot be split over {ranks.size} sequence ranks"
        )
    exchange = sequence.to_heads if to_heads else sequence.to_tokens
    return exchange([input], [heads], dims, ranks)[0].contiguous()


def single_all_to_all(
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: ProcessGroup | None,
    async_op: bool = False,
    handle: Any = None,
    type: str | None = None,
    num_kv_heads: int | None = None,
) -> Tensor:
    """Exchange once, without a gradient; see the module.

    async_op, handle, type: ignored; the result is complete when the call returns.
    num_kv_heads: groups of heads that stay together; needed to return heads that do not divide.
    """
    if num_kv_heads is None:
        shared = input.shape[_HEADS]
        num_kv_heads = shared if scatter_idx >= _HEADS else shared * ModelParallelGroup.of(group).size
    return uneven_heads_all2all(input, scatter_idx, gather_idx, batch_dim_idx, group, num_kv_heads)


class _SeqAllToAll(Function):
    """Differentiable `single_all_to_all`."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | None, input: Tensor, *rest: Any) -> Tensor:
        """rest: scatter_idx, gather_idx, batch_dim_idx, stream, handle, type, is_fwd, num_kv_heads; three needed."""
        scatter_idx, gather_idx, batch_dim_idx = rest[:3]
        num_kv_heads = rest[7] if len(rest) > 7 else None
        if num_kv_heads is None and scatter_idx >= _HEADS:
            num_kv_heads = input.shape[_HEADS]
        ctx.way = group, gather_idx, scatter_idx, batch_dim_idx, num_kv_heads
        ctx.num_rest = len(rest)
        return single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group, num_kv_heads=num_kv_heads)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        group, scatter_idx, gather_idx, batch_dim_idx, num_kv_heads = ctx.way
        grad = _SeqAllToAll.apply(  # type: ignore[no-untyped-call]
            group, *grad_output, scatter_idx, gather_idx, batch_dim_idx, None, None, None, False, num_kv_heads
        )
        return None, grad, *(None,) * ctx.num_rest


class _DimZeroAllToAll(_AllToAll):
    """All-to-all of dim 0, which has one entry for each rank; backward is the same."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | None, input: Tensor) -> Tensor:
        size = ModelParallelGroup.of(group).size
        if input.shape[0] != size:
            raise ValueError(f"dim 0 of shape {list(input.shape)} must be the number of ranks, {size}")
        return _AllToAll.forward(ctx, group, input)


def _dim_zero_all_to_all(group: ProcessGroup | None, input: Tensor) -> Tensor:
    """Exchange dim 0; differentiable.  Raises ValueError unless it is the number of ranks."""
    exchanged: Tensor = _DimZeroAllToAll.apply(group, input)  # type: ignore[no-untyped-call]
    return exchanged


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Rotate the first features of (tokens, ..., width) by position (Su et al. 2021); the rest stays."""
    width = freqs_cos.shape[-1]
    turned, rest = t[..., :width], t[..., width:]
    turned = turned * freqs_cos + _rotate_half(turned) * freqs_sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@final
class DistributedAttention(nn.Module):
    """`zpartition.sequence.DistributedAttention` with the index of the batch dim instead of the token dim."""

    def __init__(
        self,
        local_attention: Callable[..., Any],
        sequence_process_group: ProcessGroup | None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """Wrap `local_attention`.

        sp_stream: ignored; query, key and value are sent in one message.
        num_kv_heads: checked against the keys.
        """
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self.num_kv_heads = num_kv_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attend over (tokens, batch, heads, width) with batch_dim_idx=1, or (batch, tokens, ...) with 0.

        rotary_pos_emb: (cosines, sines) of all tokens, (batch or 1, tokens, ...); rotates queries and keys after the
            exchange.

        Raises ValueError if the heads cannot be assigned to the ranks, or for another batch_dim_idx.
        """
        if batch_dim_idx not in (0, 1):
            raise ValueError(
                f"batch_dim_idx must be 0 (batch, tokens, ...) or 1 (tokens, batch, ...), got {batch_dim_idx}"
            )
        if self.num_kv_heads not in (None, key.shape[self.scatter_idx]):
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}, but the keys have shape {list(key.shape)}")
        tokens = 1 - batch_dim_idx if batch_dim_idx == self.gather_idx else self.gather_idx
        attend = self.local_attn if rotary_pos_emb is None else _Rotated(self.local_attn, rotary_pos_emb)
        attention = sequence.DistributedAttention(attend, self.spg, self.scatter_idx, tokens)
        attended: Tensor = attention(query, key, value, *args, **kwargs)
        return attended


@final
class _Rotated:
    """An attention whose queries and keys are rotated first."""

    def __init__(self, attention: Callable[..., Any], rotary_pos_emb: Any) -> None:
        self.attention = attention
        self.cos, self.sin = (each.permute(1, 0, 2, 3) for each in rotary_pos_emb)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        query, key = (apply_rotary_pos_emb(each, self.cos, self.sin) for each in (query, key))
        return self.attention(query, key, value, *args, **kwargs)
