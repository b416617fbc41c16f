"""What crosses between tensor ranks, in pairs: each forward's message is the other's backward.

    copy              identity        <->  all-reduce        into a layer that is split by columns
    reduce            all-reduce      <->  identity          out of a layer that is split by rows
    gather_tokens     all-gather      <->  reduce-scatter    the same two, where activations between layers are
    scatter_sums      reduce-scatter  <->  all-gather        split by tokens
    own_tokens        slice           <->  all-gather        from and to activations that every rank has whole,
    all_tokens        all-gather      <->  slice             whose gradients are whole on every rank
    own_features      slice           <->  all-gather        the same along the last dim, in uneven parts
    all_features      all-gather      <->  slice

The first four are f, g of Shoeybi et al. 2019 (Megatron-LM, section 3) and g-bar, f-bar of Korthikanti et al. 2022
(section 4.2.2).  All work on a cell of one rank, where nothing travels.

Tensors may have any shape and dtype; `dim` counts from the front.  What a function is given is not changed, but for
`reduce`, which sums in the memory of its argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import zcomm
from zpartition.cells import Cell

__all__ = [
    "all_features",
    "all_tokens",
    "copy",
    "copy_all",
    "gather_tokens",
    "own_features",
    "own_tokens",
    "reduce",
    "scatter_sums",
]

# Context objects are torch's; what they carry are plain attributes.


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cell: Cell) -> Tensor:
        ctx.cell = cell
        return x.detach()  # which is no view: Entrance keeps it no longer than x lives

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _summed(grad, ctx.cell), None


class _CopyAll(Function):
    @staticmethod
    def forward(ctx: Any, cell: Cell, *tensors: Tensor) -> Any:
        ctx.cell = cell
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        zcomm.all_reduce(flat, ctx.cell.group, label="gradients of shared weights")
        parts = torch.split(flat, [grad.numel() for grad in grads])
        return None, *(part.view(grad.shape) for part, grad in zip(parts, grads))


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cell: Cell) -> Tensor:
        ctx.mark_dirty(x)
        zcomm.all_reduce(x, cell.group, label="tensor outputs")
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cell: Cell, dim: int) -> Tensor:
        ctx.cell, ctx.dim = cell, dim
        return _gathered(x, cell, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _scattered(grad, ctx.cell, ctx.dim), None, None


class _ScatterSums(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cell: Cell, dim: int) -> Tensor:
        ctx.cell, ctx.dim = cell, dim
        return _scattered(x, cell, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gathered(grad, ctx.cell, ctx.dim), None, None


class _Own(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cell: Cell, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.rest = cell, dim, sizes
        return _own(x, cell, dim, sizes).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _joined(grad, *ctx.rest), None, None, None


class _All(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cell: Cell, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.rest = cell, dim, sizes
        return _joined(x, cell, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _own(grad, *ctx.rest), None, None, None


def copy(x: Tensor, cell: Cell) -> Tensor:
    """`x`, the same on all ranks; its gradient is the sum of theirs."""
    copied: Tensor = _applied(_Copy, x, cell)
    return copied


def copy_all(tensors: Sequence[Tensor], cell: Cell) -> tuple[Tensor, ...]:
    """The same of several at once, of one dtype: their gradients travel as one message."""
    copied: tuple[Tensor, ...] = _applied(_CopyAll, cell, *tensors)
    return copied


def reduce(x: Tensor, cell: Cell) -> Tensor:
    """The sum of the ranks' `x`, which is contiguous and overwritten."""
    reduced: Tensor = _applied(_Reduce, x, cell)
    return reduced


def gather_tokens(x: Tensor, cell: Cell, dim: int) -> Tensor:
    """The ranks' tokens along `dim`, joined; each token's gradient is the sum of the ranks'."""
    gathered: Tensor = _applied(_GatherTokens, x, cell, dim)
    return gathered


def scatter_sums(x: Tensor, cell: Cell, dim: int) -> Tensor:
    """This rank's tokens along `dim` of the sum of the ranks' `x`.  Raises ValueError if they do not divide."""
    _refuse_uneven(x, cell, dim)
    scattered: Tensor = _applied(_ScatterSums, x, cell, dim)
    return scattered


def own_tokens(x: Tensor, cell: Cell, dim: int) -> Tensor:
    """This rank's tokens of an `x` that every rank has.  Raises ValueError if they cannot be shared out."""
    _refuse_uneven(x, cell, dim)
    part: Tensor = _applied(_Own, x, cell, dim, (x.shape[dim] // cell.size,) * cell.size)
    return part


def all_tokens(x: Tensor, cell: Cell, dim: int) -> Tensor:
    """The ranks' tokens joined, for what every rank does alike."""
    joined: Tensor = _applied(_All, x, cell, dim, (x.shape[dim],) * cell.size)
    return joined


def own_features(x: Tensor, cell: Cell, sizes: tuple[int, ...]) -> Tensor:
    """This rank's part of the last dim of an `x` that every rank has; `sizes` of all ranks' parts."""
    part: Tensor = _applied(_Own, x, cell, x.dim() - 1, sizes)
    return part


def all_features(x: Tensor, cell: Cell, sizes: tuple[int, ...]) -> Tensor:
    """The ranks' parts of the last dim joined, for what every rank does alike."""
    joined: Tensor = _applied(_All, x, cell, x.dim() - 1, sizes)
    return joined


def _applied(function: type[Function], *args: Any) -> Any:
    """torch's `apply`, which has no types."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


# --- messages --------------------------------------------------------------------------------------------


def _summed(grad: Tensor, cell: Cell) -> Tensor:
    """All-reduced in place: between this package's layers nobody else has a gradient of their input."""
    grad = grad.contiguous()
    zcomm.all_reduce(grad, cell.group, label="tensor input gradients")
    return grad


def _gathered(x: Tensor, cell: Cell, dim: int) -> Tensor:
    """(..., n, ...) of each rank -> (..., size * n, ...)."""
    if cell.size == 1:
        return x.view_as(x)
    parts = x.new_empty((cell.size, *x.shape))
    zcomm.all_gather(parts.view(-1), x.contiguous().view(-1), cell.group, label="tokens")
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _scattered(x: Tensor, cell: Cell, dim: int) -> Tensor:
    """(..., size * n, ...) -> (..., n, ...), summed."""
    if cell.size == 1:
        return x.view_as(x)
    shape = (*x.shape[:dim], cell.size, x.shape[dim] // cell.size, *x.shape[dim + 1 :])
    parts = x.reshape(shape).movedim(dim, 0).contiguous()
    parts = parts.clone() if parts.data_ptr() == x.data_ptr() else parts  # the message overwrites it
    zcomm.reduce_scatter(parts[cell.rank].view(-1), parts.view(-1), cell.group, label="token sums")
    return parts[cell.rank]


def _own(x: Tensor, cell: Cell, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return x.narrow(dim, sum(sizes[: cell.rank]), sizes[cell.rank])


def _joined(x: Tensor, cell: Cell, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """The ranks' parts, of `sizes` along `dim`; padded to the longest on their way."""
    if cell.size == 1:
        return x.clone()
    longest = max(sizes)
    padded = x.new_zeros((*x.shape[:dim], longest, *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, sizes[cell.rank]).copy_(x)
    parts = padded.new_empty((cell.size, *padded.shape))
    zcomm.all_gather(parts.view(-1), padded.view(-1), cell.group, label="parts")
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes)], dim)


def _refuse_uneven(x: Tensor, cell: Cell, dim: int) -> None:
    if x.shape[dim] % cell.size:
        raise ValueError(
            f"{x.shape[dim]} tokens (dim {dim} of shape {list(x.shape)}) cannot be shared out evenly over "
            f"{cell.size} tensor ranks: pad the sequence to a multiple of {cell.size}, or use sequence_dim=-1."
        )
