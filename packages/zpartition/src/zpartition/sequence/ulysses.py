"""Ulysses: attention with inputs split by tokens outside and by heads inside (Jacobs et al. 2023).

Every layer except attention works token by token, so a sequence can be split over ranks.  Attention needs all tokens,
but works head by head.  `DistributedAttention` exchanges one split for the other before any given attention, and back
after it.  There are two messages forward, one for query, key and value together and one for the output, and two
backward; each carries 1/size of a rank's data, so their time falls with the number of ranks.

The attention sees whole sequences: masks, positions and causality are those of one process.  A value as long as the
sequence (a mask, a bias) must cover all tokens, and may cover all heads only if it is the same for each.

Rejected: overlapping the three messages with the projections, as the paper's authors do with their own streams: the
model would have to give up its projections.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.sequence.head_all_to_all import Dims, HeadAssignment, Ranges, to_heads, to_tokens
from zpartition.sequence.random_state import rank_random_state, uses_dropout

__all__ = ["DistributedAttention", "heads_to_tokens", "tokens_to_heads"]


class _ToHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, ranges: tuple[Ranges, ...], dims: Dims, mp_group: ModelParallelGroup, *tensors: Tensor
    ) -> Any:
        ctx.rest = ranges, dims, mp_group
        return tuple(to_heads(tensors, ranges, dims, mp_group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *to_tokens(grads, *ctx.rest)


class _ToTokens(Function):
    @staticmethod
    def forward(ctx: Any, heads: Ranges, dims: Dims, mp_group: ModelParallelGroup, x: Tensor) -> Tensor:
        ctx.rest = (heads,), dims, mp_group
        return to_tokens([x], (heads,), dims, mp_group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, to_heads([grad], *ctx.rest)[0]


def tokens_to_heads(
    query: Tensor, key: Tensor, value: Tensor, assignment: HeadAssignment, dims: Dims, mp_group: ModelParallelGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all tokens of this rank's heads.

    Differentiable; collective of the group: one message forward and one backward.

    query: (..., all heads, ..., tokens of this rank, ...) in the dims that `dims` names.
    key, value: likewise, with their own number of heads and possibly another number of tokens.
    """
    ranges = assignment.queries(), assignment.key_values(), assignment.key_values()
    q, k, v = _apply_outside_graph(_ToHeads, ranges, dims, mp_group, query, key, value)
    if wanted := assignment.repeats(mp_group.rank):
        index = torch.tensor(wanted, device=k.device)
        k, v = k.index_select(dims.heads, index), v.index_select(dims.heads, index)
    return q, k, v


def heads_to_tokens(x: Tensor, assignment: HeadAssignment, dims: Dims, mp_group: ModelParallelGroup) -> Tensor:
    """Return all heads of this rank's tokens.  Differentiable; collective of the group."""
    tokens: Tensor = _apply_outside_graph(_ToTokens, assignment.queries(), dims, mp_group, x)
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
        """Wrap `local_attention(query, key, value, *args, **kwargs)`, which returns a tensor laid out as query is.

        group: the sequence ranks, in the order of their tokens.
        scatter_idx: the dim of heads.
        gather_idx: the dim of tokens.
        (2, 1) for (batch, tokens, heads, width), (1, 2) for torch's scaled_dot_product_attention and FlexAttention.
        """
        super().__init__()
        self.local_attention = local_attention
        self.mp_group = ModelParallelGroup.of(group)
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return this rank's tokens of the attention over all tokens; collective of the group.

        Further arguments are passed to the attention unchanged.  An attention with dropout draws from a separate
        stream on each rank.

        Raises:
            ValueError: the heads cannot be split over the ranks, with the numbers; before any message.
        """
        mp_group = self.mp_group
        if mp_group.size == 1:
            return _check_output(self.local_attention(query, key, value, *args, **kwargs), query, None)
        dims = Dims(_positive_dim(self.scatter_idx, query), _positive_dim(self.gather_idx, query))
        assignment = assign_heads(query, key, value, dims, mp_group)
        q, k, v = tokens_to_heads(query, key, value, assignment, dims, mp_group)
        dropout = kwargs.get("dropout_p") or kwargs.get("dropout") or 0.0
        drawing = (
            rank_random_state(mp_group, q.device) if uses_dropout(self.local_attention, dropout) else nullcontext()
        )
        with drawing:
            out = _check_output(self.local_attention(q, k, v, *args, **kwargs), q, dims)
        return heads_to_tokens(out, assignment, dims, mp_group)

    def extra_repr(self) -> str:
        """Numbers for `print`."""
        return f"ranks={self.mp_group.size}, scatter_idx={self.scatter_idx}, gather_idx={self.gather_idx}"


def assign_heads(
    query: Tensor, key: Tensor, value: Tensor, dims: Dims, mp_group: ModelParallelGroup
) -> HeadAssignment:
    """Assign the heads of these to ranks.

    Raises ValueError if the shapes do not match or the heads cannot be split.
    """
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if dims.heads == dims.tokens or not query.dim() == key.dim() == value.dim():
        raise ValueError(
            f"{shapes} with heads in dim {dims.heads} and tokens in dim {dims.tokens}: pass tensors with equally "
            "many dims, and different scatter_idx (heads) and gather_idx (tokens)."
        )
    if any(key.shape[dim] != value.shape[dim] for dim in (dims.heads, dims.tokens)):
        raise ValueError(f"{shapes}: key and value must have equal heads (dim {dims.heads}) and tokens.")
    return HeadAssignment(query.shape[dims.heads], key.shape[dims.heads], mp_group.size)


def _check_output(out: Any, query: Tensor, dims: Dims | None) -> Tensor:
    """Return the output of an attention.  Raises ValueError if it is not laid out as its query."""
    if not isinstance(out, Tensor):
        raise ValueError(
            f"the attention returned a {type(out).__name__}: wrap it so that it returns only its output."
        )
    if dims is not None and out.shape[: query.dim() - 1] != query.shape[:-1]:
        raise ValueError(
            f"the attention returned shape {list(out.shape)} for a query of shape {list(query.shape)}: it must keep "
            "all dims but the last."
        )
    return out


def _positive_dim(dim: int, tensor: Tensor) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"a query of shape {list(tensor.shape)} has no dim {dim}.")
    return dim % tensor.dim()


def _apply_outside_graph(function: type[Function], *args: Any) -> Any:
    """Call torch's `apply`; a compiled graph ends before it, and another begins after it.

    A compiler that traces into it would take the buffer of a message for a tensor without history, with gradients of
    0.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(function.apply)(*args)  # type: ignore[no-untyped-call]
    return function.apply(*args)  # type: ignore[no-untyped-call]
