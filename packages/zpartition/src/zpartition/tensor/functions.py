"""Autograd functions between tensor ranks, in pairs: one's forward collective is the other's in backward.

    copy                   identity        <->  all-reduce        into a layer that is split by columns
    reduce                 all-reduce      <->  identity          out of a layer that is split by rows
    gather_tokens          all-gather      <->  reduce-scatter    the same two, where activations between layers are
    reduce_scatter_tokens  reduce-scatter  <->  all-gather        split by tokens
    slice_tokens           slice           <->  all-gather        from and to activations that every rank has whole,
    join_tokens            all-gather      <->  slice             with gradients that are whole on every rank
    slice_features         slice           <->  all-gather        the same along the last dim, in uneven parts
    join_features          all-gather      <->  slice

The first four are f, g of Shoeybi et al. 2019 (Megatron-LM, section 3) and g-bar, f-bar of Korthikanti et al. 2022
(section 4.2.2).  All of them accept a group of one rank, where nothing is sent.

Tensors may have any shape and dtype; `dim` counts from the front.  Arguments are not modified, except by `reduce`,
which sums in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import zcomm
from zpartition.layout.model_parallel import ModelParallelGroup

__all__ = [
    "copy",
    "copy_all",
    "gather_tokens",
    "join_features",
    "join_tokens",
    "reduce",
    "reduce_scatter_tokens",
    "slice_features",
    "slice_tokens",
]


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mp_group: ModelParallelGroup) -> Tensor:
        ctx.mp_group = mp_group
        return x.detach()  # which is no view: ParallelRegion keeps it no longer than x lives

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_reduce(grad, ctx.mp_group), None


class _CopyAll(Function):
    @staticmethod
    def forward(ctx: Any, mp_group: ModelParallelGroup, *tensors: Tensor) -> Any:
        ctx.mp_group = mp_group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        zcomm.all_reduce(flat, ctx.mp_group.group, label="gradients of shared weights")
        parts = torch.split(flat, [grad.numel() for grad in grads])
        return None, *(part.view(grad.shape) for part, grad in zip(parts, grads))


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mp_group: ModelParallelGroup) -> Tensor:
        ctx.mark_dirty(x)
        zcomm.all_reduce(x, mp_group.group, label="tensor outputs")
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mp_group: ModelParallelGroup, dim: int) -> Tensor:
        ctx.mp_group, ctx.dim = mp_group, dim
        return _all_gather(x, mp_group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _reduce_scatter(grad, ctx.mp_group, ctx.dim), None, None


class _ReduceScatterTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mp_group: ModelParallelGroup, dim: int) -> Tensor:
        ctx.mp_group, ctx.dim = mp_group, dim
        return _reduce_scatter(x, mp_group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_gather(grad, ctx.mp_group, ctx.dim), None, None


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mp_group: ModelParallelGroup, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.rest = mp_group, dim, sizes
        return _narrow_to_own(x, mp_group, dim, sizes).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_gather_uneven(grad, *ctx.rest), None, None, None


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mp_group: ModelParallelGroup, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.rest = mp_group, dim, sizes
        return _all_gather_uneven(x, mp_group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _narrow_to_own(grad, *ctx.rest), None, None, None


def copy(x: Tensor, mp_group: ModelParallelGroup) -> Tensor:
    """Return `x` (any shape), equal on all ranks; its gradient is the sum of theirs."""
    copied: Tensor = _apply(_Copy, x, mp_group)
    return copied


def copy_all(tensors: Sequence[Tensor], mp_group: ModelParallelGroup) -> tuple[Tensor, ...]:
    """Copy several tensors of one dtype; their gradients are all-reduced as one message."""
    copied: tuple[Tensor, ...] = _apply(_CopyAll, mp_group, *tensors)
    return copied


def reduce(x: Tensor, mp_group: ModelParallelGroup) -> Tensor:
    """Return the sum of the ranks' `x` (any shape), which must be contiguous and is overwritten."""
    reduced: Tensor = _apply(_Reduce, x, mp_group)
    return reduced


def gather_tokens(x: Tensor, mp_group: ModelParallelGroup, dim: int) -> Tensor:
    """Join the ranks' tokens along `dim`; each token's gradient is the sum of the ranks' gradients."""
    gathered: Tensor = _apply(_GatherTokens, x, mp_group, dim)
    return gathered


def reduce_scatter_tokens(x: Tensor, mp_group: ModelParallelGroup, dim: int) -> Tensor:
    """Return this rank's tokens of the sum of the ranks' `x`.  Raises ValueError if they do not divide."""
    _check_even(x, mp_group, dim)
    scattered: Tensor = _apply(_ReduceScatterTokens, x, mp_group, dim)
    return scattered


def slice_tokens(x: Tensor, mp_group: ModelParallelGroup, dim: int) -> Tensor:
    """Return this rank's tokens of an `x` that every rank has.  Raises ValueError if they do not divide."""
    _check_even(x, mp_group, dim)
    part: Tensor = _apply(_Slice, x, mp_group, dim, (x.shape[dim] // mp_group.size,) * mp_group.size)
    return part


def join_tokens(x: Tensor, mp_group: ModelParallelGroup, dim: int) -> Tensor:
    """Join the ranks' tokens, equally many in `dim`, for replicated computation."""
    joined: Tensor = _apply(_Join, x, mp_group, dim, (x.shape[dim],) * mp_group.size)
    return joined


def slice_features(x: Tensor, mp_group: ModelParallelGroup, sizes: tuple[int, ...]) -> Tensor:
    """Return this rank's (..., sizes[rank]) of an `x` (..., sum(sizes)) that every rank has."""
    part: Tensor = _apply(_Slice, x, mp_group, x.dim() - 1, sizes)
    return part


def join_features(x: Tensor, mp_group: ModelParallelGroup, sizes: tuple[int, ...]) -> Tensor:
    """Join the ranks' parts (..., sizes[rank]) to (..., sum(sizes)), for replicated computation."""
    joined: Tensor = _apply(_Join, x, mp_group, x.dim() - 1, sizes)
    return joined


def _apply(function: type[Function], *args: Any) -> Any:
    """Call torch's `apply`, which is untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


# --- messages --------------------------------------------------------------------------------------------


def _all_reduce(grad: Tensor, mp_group: ModelParallelGroup) -> Tensor:
    """All-reduce in place: nothing but this package's layers holds a gradient of their input."""
    grad = grad.contiguous()
    zcomm.all_reduce(grad, mp_group.group, label="tensor input gradients")
    return grad


def _all_gather(x: Tensor, mp_group: ModelParallelGroup, dim: int) -> Tensor:
    """All-gather (..., n, ...) of each rank -> (..., size * n, ...)."""
    if mp_group.size == 1:
        return x.view_as(x)
    parts = x.new_empty((mp_group.size, *x.shape))
    zcomm.all_gather(parts.view(-1), x.contiguous().view(-1), mp_group.group, label="tokens")
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(x: Tensor, mp_group: ModelParallelGroup, dim: int) -> Tensor:
    """Reduce-scatter (..., size * n, ...) -> (..., n, ...)."""
    if mp_group.size == 1:
        return x.view_as(x)
    shape = (*x.shape[:dim], mp_group.size, x.shape[dim] // mp_group.size, *x.shape[dim + 1 :])
    parts = x.reshape(shape).movedim(dim, 0).contiguous()
    parts = parts.clone() if parts.data_ptr() == x.data_ptr() else parts  # the message overwrites it
    zcomm.reduce_scatter(parts[mp_group.rank].view(-1), parts.view(-1), mp_group.group, label="token sums")
    return parts[mp_group.rank]


def _narrow_to_own(x: Tensor, mp_group: ModelParallelGroup, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return x.narrow(dim, sum(sizes[: mp_group.rank]), sizes[mp_group.rank])


def _all_gather_uneven(x: Tensor, mp_group: ModelParallelGroup, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """All-gather the ranks' parts, of `sizes` along `dim`; padded to the longest for the message."""
    if mp_group.size == 1:
        return x.clone()
    longest = max(sizes)
    padded = x.new_zeros((*x.shape[:dim], longest, *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, sizes[mp_group.rank]).copy_(x)
    parts = padded.new_empty((mp_group.size, *padded.shape))
    zcomm.all_gather(parts.view(-1), padded.view(-1), mp_group.group, label="parts")
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes)], dim)


def _check_even(x: Tensor, mp_group: ModelParallelGroup, dim: int) -> None:
    if x.shape[dim] % mp_group.size:
        raise ValueError(
            f"{x.shape[dim]} tokens (dim {dim} of shape {list(x.shape)}) cannot be split evenly over {mp_group.size} "
            f"tensor ranks: pad the sequence to a multiple of {mp_group.size}, or use sequence_dim=-1."
        )
