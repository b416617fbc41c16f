"""Norm and finiteness of all gradients in one read and one all_reduce, and what follows from them.

Clipping needs the global L2 norm, loss scaling needs to know whether anything is infinite or NaN, and
telemetry wants a few sums over ranks.  One number answers the first two: a sum of squares is finite only if
every term is.  So the gradients are read once, and one float64 vector [sum of squares, *extra] is reduced.
Gradients are only read; dividing them is left to the optimizer, which reads them anyway (`clip_divisor` makes
the scalar).

[Note: how the squares are summed]  torch.linalg.vector_norm of a large float32 tensor adds in float32 and is
too small by 6e-4; converting all of it to float64 is three to forty times slower than reading it.  Therefore:
  - whole rows of a shard: norms of short rows in float32, which run at the speed of memory, squared and
    summed in float64.  The rounding of the rows averages out to 1e-9; where it agrees instead it stays below
    5e-8 for half-precision values and 3e-7 for constants (rows of 1024: four times that, and 10% faster);
  - what is left, less than a row of each shard: packed together and summed in float64, to the last bit or two.
A shard's size never decides: a gradient cut anywhere between rows has the same row norms, so the norm is the same to
a few 1e-16 however many ranks share it, and stages of ZeRO that clip by it stay equal bit for bit.
All sums are over rows of a fixed length.  Torch splits a sum to one number among its threads, wherever that
falls, but never splits a row; so the same gradients give the same bits with any number of threads.

[Note: the second read]  The square of a finite float32 gradient overflows beyond 1.8e19, and that of a
float64 one beyond 1e154.  When the reduced sum is not finite, every shard is read again in float64 with a
fixed small scale, where no square of a finite element overflows, and that sum decides.  Its trigger is the
reduced value, the same on all ranks: either all take the second all_reduce or none does.  A step that
overflows pays a second read; an ordinary step pays nothing.

Rejected: torch.nn.utils.get_total_norm (float32 sums, a list of small norms, no reduction), a finiteness
check of its own (a second pass), a maximum reduced beside the sum (a second all_reduce).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor

from zprecision import checks

_ROW = 1024  # elements of a row of a float64 sum; part of the result's bits
_NORM_ROW = 128  # elements of a row of a float32 norm, a divisor of _ROW; part of the result's bits
_SECOND_READ_SCALE = 2.0**-540  # squares of 2**1024 become 2**968, those of 2**59 stay normal numbers


@attrs.frozen(eq=False)
class GradientStats:
    """What one look at the gradients tells; equal on all ranks that share the all_reduce."""

    norm: Tensor  # () float64: L2 over all shards of all ranks, still scaled; inf or NaN if any element is
    found_inf: Tensor  # () float32: 1 if any element on any rank is infinite or NaN, else 0
    extra: Tensor  # (k,) float64: what was passed as extra, summed over ranks
    numbers: tuple[float, ...]  # norm and extra on the host, where they came with the one wait for the device

    @property
    def finite(self) -> bool:
        """Whether the step may be applied."""
        return math.isfinite(self.numbers[0])


def _alone(_: Tensor) -> None:
    """The all_reduce of a world of one."""


def inspect(
    grads: Sequence[Tensor],
    *,
    all_reduce: Callable[[Tensor], object] = _alone,
    extra: Tensor | None = None,
    squares: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> GradientStats:
    """Norm and finiteness of `grads` over all ranks; nothing is modified.

    grads: dense float16, bf16, float32 or float64 tensors of any shape on one device; their union over the
        ranks is the gradient, each element once. A rank without any passes [], or [torch.empty(0, device=...)]
        where all_reduce needs its device. A non-contiguous tensor is copied first.
    all_reduce: sums a 1-D float64 tensor over the ranks in place; called once, and once more if the first
        sum is not finite.
    extra: (k,) or () real; summed over the ranks in the same call. It has no say in found_inf.
    squares: adds up the squares of 1-D gradients of this rank, () float64, where somebody can do it faster than torch
        (zoptim.sum_of_squares); the bits of the norm are then its bits.

    Waits for the device once. TypeError or ValueError with the index of a gradient that does not fit.
    """
    shards = _flat(grads)
    with torch.no_grad():
        passengers = torch.empty(0) if extra is None else extra.detach().reshape(-1)
        device = grads[0].device if grads else passengers.device
        own = _total(_first_read(shards), device) if squares is None else squares(shards).view(1)
        vector = torch.cat([own.to(device), passengers.to(device, torch.float64)])
        all_reduce(vector)
        norm = vector[0].sqrt()
        total, *others = vector.tolist()
        if math.isfinite(total):
            length = math.sqrt(total)
        else:
            own = _total(_exact_squares(shards, _SECOND_READ_SCALE), device)
            all_reduce(own)
            norm = own[0].sqrt() / _SECOND_READ_SCALE
            length = norm.item()
        found_inf = torch.full((), float(not math.isfinite(length)), device=device)
    return GradientStats(norm, found_inf, vector[1:], (length, *others))


def joined(stats: Sequence[GradientStats], device: torch.device) -> GradientStats:
    """The looks at several parts of the gradients as one, on `device`; the first one brings `extra`."""
    norms = torch.stack([each.norm.to(device) for each in stats])
    found = torch.stack([each.found_inf.to(device) for each in stats])
    norm = norms[0] if len(stats) == 1 else norms.square().sum().sqrt()
    return GradientStats(norm, found.amax(), stats[0].extra.to(device), (norm.item(), *stats[0].numbers[1:]))


def clip_divisor(norm: Tensor, factor: Tensor, max_norm: float) -> Tensor:
    """What to divide the gradients by, to undo the loss scale and clip to `max_norm` at once.

    norm: () float64, L2 of the still scaled gradients; factor: () float32, the scale that they carry.
    Result: () float32, factor * max(1, (norm / factor + 1e-6) / max_norm), computed without a host sync;
    max_norm == 0 means no clipping. Dividing by it does what torch.nn.utils.clip_grad_norm_ does to unscaled
    gradients. ValueError for a negative or NaN max_norm.
    """
    if not checks.is_number(max_norm) or not max_norm >= 0:
        raise ValueError(f"clip_divisor(max_norm={max_norm!r}): give a number >= 0; 0 means no clipping")
    if max_norm == 0:
        return factor.float()
    scale = factor.double()
    return (scale * ((norm / scale + 1e-6) / max_norm).clamp(min=1.0)).float()


def divisor_of(norm: float, factor: float, max_norm: float) -> float:
    """`clip_divisor` of numbers that are on the host already: the same value, without a kernel for each operation."""
    if max_norm == 0:
        return factor
    return factor * max(1.0, (norm / factor + 1e-6) / max_norm)


@attrs.frozen
class Culprit:
    """The first tensor that is not finite."""

    name: str
    kind: Literal["nan", "inf"]  # "nan" if any element is NaN; "inf" if some are infinite and none is NaN


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> Culprit | None:
    """The first of the (name, tensor) pairs with an infinite or NaN element; None if all are finite.

    For diagnosis after an overflow: waits for the device once a tensor. Integer tensors are finite.
    """
    for name, tensor in named:
        values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
        if not bool(torch.isfinite(values).all()):
            return Culprit(name, "nan" if bool(torch.isnan(values).any()) else "inf")
    return None


# --- Sums of squares: see [Note: how the squares are summed] ---------------------------------------------


def _flat(grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that have elements, as 1-D views (copies where no view is possible)."""
    for index, grad in enumerate(grads):
        if not isinstance(grad, Tensor):
            raise TypeError(f"inspect: gradient {index} is a {type(grad).__name__}; leave it out of the list")
        if grad.layout != torch.strided:
            raise TypeError(f"inspect: gradient {index} is {grad.layout}; pass its coalesce().values()")
        if grad.dtype not in checks.FLOATING:
            raise TypeError(f"inspect: gradient {index} is {grad.dtype}; a real floating dtype is needed")
        if grad.device != grads[0].device:
            raise ValueError(
                f"inspect: gradient {index} is on {grad.device}, gradient 0 on {grads[0].device};"
                " inspect each device's on its own and add the squares of the norms"
            )
    return [grad.detach().reshape(-1) for grad in grads if grad.numel()]


def _first_read(shards: list[Tensor]) -> list[Tensor]:
    """1-D float64 tensors that add up to the sum of squares: by rows for bulks, exact for what is left."""
    parts, rests = [], []
    for shard in shards:
        bulk_numel = shard.numel() // _ROW * _ROW
        parts += _row_squares(shard[:bulk_numel]) if bulk_numel else []
        rests += [shard[bulk_numel:]] if bulk_numel < shard.numel() else []
    return parts + _exact_squares(rests)


def _row_squares(bulk: Tensor) -> list[Tensor]:
    """1-D float64 tensors, an element for each short row of `bulk`, whose length is a multiple of a row."""
    narrow = bulk.dtype in (torch.float16, torch.bfloat16)  # these would round the norm to their few bits
    pieces = _widened([bulk], torch.float32, _chunk_numel(bulk, 2**18)) if narrow else (bulk,)
    return [torch.linalg.vector_norm(piece.view(-1, _NORM_ROW), dim=1).double().square_() for piece in pieces]


def _exact_squares(shards: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    """1-D float64 tensors that add up to the sum of (scale * element)**2, every operation in float64."""
    if not shards:
        return []
    chunks = _widened(shards, torch.float64, _chunk_numel(shards[0], 2**15))
    return [chunk.mul_(scale).square_().view(-1, _ROW).sum(dim=1) for chunk in chunks]


def _widened(shards: list[Tensor], dtype: torch.dtype, limit: int) -> Iterator[Tensor]:
    """The elements of all shards one after the other in `dtype`, in chunks of `limit`; the last is padded with
    zeros to a multiple of a row.

    All chunks are one scratch buffer, which the caller may overwrite and must have done with before the next:
    fresh pages cost more than the arithmetic. Many small gradients share a chunk and its few kernels.
    """
    total = sum(shard.numel() for shard in shards)
    scratch = torch.empty(min(limit, _whole_rows(total)), dtype=dtype, device=shards[0].device)
    used = 0
    for shard in shards:
        start = 0
        while start < shard.numel():
            taken = min(scratch.numel() - used, shard.numel() - start)
            scratch[used : used + taken].copy_(shard[start : start + taken])
            start, used = start + taken, used + taken
            if used == scratch.numel():
                yield scratch
                used = 0
    if used:
        yield _zero_from(scratch[: _whole_rows(used)], used)


def _zero_from(values: Tensor, start: int) -> Tensor:
    values[start:].zero_()
    return values


def _total(parts: list[Tensor], device: torch.device) -> Tensor:
    """(1,) float64 on device: the sum over all of the 1-D `parts`, by rows, then by rows of those."""
    values = torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64, device=device)
    while values.numel() > _ROW:
        padding = _whole_rows(values.numel()) - values.numel()
        values = torch.nn.functional.pad(values, (0, padding)).view(-1, _ROW).sum(dim=1)
    return values.sum(dim=0, keepdim=True)


def _whole_rows(numel: int) -> int:
    """`numel` rounded up to a multiple of a row."""
    return -(-numel // _ROW) * _ROW


def _chunk_numel(shard: Tensor, on_cpu: int) -> int:
    """How many elements to convert at a time: what stays in the cache, elsewhere what keeps launches few."""
    return on_cpu if shard.device.type == "cpu" else 2**24
