"""Ulysses: an attention whose inputs are split by tokens outside and by heads inside (Jacobs et al. 2023).

Every layer but attention works token by token, so a sequence can be shared out over ranks.  An attention needs all
tokens, but works head by head.  `DistributedAttention` trades one split for the other before the attention, whichever
callable that is, and back after it.  Two messages forward, one for query, key and value together and one for the
output, and two backward; each carries 1/size of what a rank has, so the time they take falls with the number of
ranks.

The attention sees whole sequences and knows nothing of this: masks, positions and causality are those of one process.
What is as long as the sequence (a mask, a bias) has to be given for all tokens, and for all heads only where it is
the same for each.

Rejected: overlapping the three messages with the projections, as the paper's authors do with streams of their own:
it takes the projections out of the model's hands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from zpartition.cells import Cell
from zpartition.sequence.shares import HeadShares
from zpartition.sequence.streams import draws, own_stream
from zpartition.sequence.trading import Dims, Ranges, to_heads, to_tokens

__all__ = ["DistributedAttention", "heads_to_tokens", "tokens_to_heads"]


class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, ranges: tuple[Ranges, ...], dims: Dims, cell: Cell, *tensors: Tensor) -> Any:
        ctx.rest = ranges, dims, cell
        return tuple(to_heads(tensors, ranges, dims, cell))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *to_tokens(grads, *ctx.rest)


class _ToTokens(Function):
    @staticmethod
    def forward(ctx: Any, heads: Ranges, dims: Dims, cell: Cell, x: Tensor) -> Tensor:
        ctx.rest = (heads,), dims, cell
        return to_tokens([x], (heads,), dims, cell)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, to_heads([grad], *ctx.rest)[0]


def tokens_to_heads(
    query: Tensor, key: Tensor, value: Tensor, shares: HeadShares, dims: Dims, cell: Cell
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads.  Differentiable; collective of the cell, one message forward and one backward.

    query: (..., all heads, ..., tokens of this rank, ...) in the places that `dims` names; key, value likewise, with
    heads of their own and maybe another number of tokens.
    """
    ranges = shares.queries(), shares.key_values(), shares.key_values()
    q, k, v = _outside_graphs(_ToHeads, ranges, dims, cell, query, key, value)
    if wanted := shares.repeats(cell.rank):
        index = torch.tensor(wanted, device=k.device)
        k, v = k.index_select(dims.heads, index), v.index_select(dims.heads, index)
    return q, k, v


def heads_to_tokens(x: Tensor, shares: HeadShares, dims: Dims, cell: Cell) -> Tensor:
    """All heads of this rank's tokens.  Differentiable; collective of the cell."""
    tokens: Tensor = _outside_graphs(_ToTokens, shares.queries(), dims, cell, x)
    return tokens


@final
class DistributedAttention(nn.Module):
    """Any attention over sequences of which each rank of a group has an equal run of tokens."""

    def __init__(
        self,
        local_attention: Callable[..., Any],
        group: ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
    ) -> None:
        """Around `local_attention(query, key, value, *args, **kwargs)`, which returns a tensor laid out as query is.

        group: the sequence ranks, in the order of their tokens.
        scatter_idx: the dim of heads.  gather_idx: the dim of tokens.  (2, 1) for (batch, tokens, heads, width), (1,
            2) for torch's scaled_dot_product_attention and FlexAttention.
        """
        super().__init__()
        self.local_attention = local_attention
        self.cell = Cell.of(group)
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """This rank's tokens of what the attention makes of all tokens; collective of the group.

        Further arguments go to the attention as they are.  An attention with dropout draws, on each rank, from a
        stream of its own.

        Raises:
            ValueError: the heads cannot be shared out over the ranks, with the numbers; before any message.
        """
        cell = self.cell
        if cell.size == 1:
            return _output(self.local_attention(query, key, value, *args, **kwargs), query, None)
        dims = Dims(_from_front(self.scatter_idx, query), _from_front(self.gather_idx, query))
        shares = shares_of(query, key, value, dims, cell)
        q, k, v = tokens_to_heads(query, key, value, shares, dims, cell)
        dropout = kwargs.get("dropout_p") or kwargs.get("dropout") or 0.0
        drawing = own_stream(cell, q.device) if draws(self.local_attention, dropout) else nullcontext()
        with drawing:
            out = _output(self.local_attention(q, k, v, *args, **kwargs), q, dims)
        return heads_to_tokens(out, shares, dims, cell)

    def extra_repr(self) -> str:
        """Numbers for `print`."""
        return f"ranks={self.cell.size}, scatter_idx={self.scatter_idx}, gather_idx={self.gather_idx}"


def shares_of(query: Tensor, key: Tensor, value: Tensor, dims: Dims, cell: Cell) -> HeadShares:
    """Who computes which heads of these.

    Raises ValueError if they do not fit together or cannot be shared out.
    """
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if dims.heads == dims.tokens or not query.dim() == key.dim() == value.dim():
        raise ValueError(
            f"{shapes} with heads in dim {dims.heads} and tokens in dim {dims.tokens}: give tensors of equally many "
            "dims, and two different ones as scatter_idx (heads) and gather_idx (tokens)."
        )
    if any(key.shape[dim] != value.shape[dim] for dim in (dims.heads, dims.tokens)):
        raise ValueError(f"{shapes}: key and value need equally many heads (dim {dims.heads}) and tokens.")
    return HeadShares(query.shape[dims.heads], key.shape[dims.heads], cell.size)


def _output(out: Any, query: Tensor, dims: Dims | None) -> Tensor:
    """What an attention returned.  Raises ValueError if it is not laid out as its query."""
    if not isinstance(out, Tensor):
        raise ValueError(
            f"the attention returned a {type(out).__name__}: wrap it so that it returns its output alone."
        )
    if dims is not None and out.shape[: query.dim() - 1] != query.shape[:-1]:
        raise ValueError(
            f"the attention returned shape {list(out.shape)} for a query of shape {list(query.shape)}: it has to "
            "keep all dims but the last."
        )
    return out


def _from_front(dim: int, tensor: Tensor) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"there is no dim {dim} in a query of shape {list(tensor.shape)}.")
    return dim % tensor.dim()


def _outside_graphs(function: type[Function], *args: Any) -> Any:
    """torch's `apply`; a compiled graph ends before it, and another begins after it.

    A compiler that looks into it takes the buffer of a message for a tensor without history: gradients would be 0.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(function.apply)(*args)  # type: ignore[no-untyped-call]
    return function.apply(*args)  # type: ignore[no-untyped-call]
