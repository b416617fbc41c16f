"""Gradient inspection: norm and finiteness of all gradients in one read and one all_reduce.

Clipping needs the global L2 norm, loss scaling needs to know whether any element is infinite or NaN, and telemetry
needs a few sums over ranks.  A sum of squares is finite only if every term is, so one number answers the first two.
The gradients are read once, and one float64 vector [sum of squares, *extra] is reduced.  Nothing is modified: the
optimizer, which reads the gradients anyway, divides them by one scalar (`clip_divisor`, or `divisor_of` on the host).

[Note: summation of squares]  On CPUs a C kernel (backends/squares.py) sums exact squares in float64 in one read.
Elsewhere, for float64, and without the kernel: torch.linalg.vector_norm of a large float32 tensor sums in float32 and
is too small by 6e-4; converting all of it to float64 is three to forty times slower than reading it.  Therefore:
  - whole rows of a shard: norms of short rows in float32, at the speed of memory, squared and summed in float64.  The
    rounding of the rows averages out to 1e-9; in the worst cases it stays below 5e-8 for half-precision values and
    3e-7 for constants (rows of 1024: four times that, and 10% faster);
  - the rest, less than a row of each shard: packed together and summed in float64, to the last bit or two.
The size of a shard does not matter: a gradient cut anywhere between rows has the same row norms, so the norm is the
same to a few 1e-16 for any number of ranks, and ZeRO stages that clip by it stay equal bit for bit.
All sums run over rows of a fixed length.  torch splits a sum to one number among its threads, but never splits a row;
so the same gradients give the same bits with any number of threads.

[Note: second read]  Without the kernel, the square of a finite float32 gradient overflows beyond 1.8e19, that of a
float64 one beyond 1e154.  When the reduced sum is not finite, every shard is read again in float64 with a fixed small
scale, at which no square of a finite element overflows, and that sum decides.  The trigger is the reduced value,
equal on all ranks: either all ranks take the second all_reduce or none does.  Only a step that overflows pays for it.

Rejected: torch.nn.utils.get_total_norm (float32 sums, a list of small norms, no reduction); a separate finiteness
check (a second pass); a maximum reduced beside the sum (a second all_reduce).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor

from zprecision import checks
from zprecision.backends.squares import sum_of_squares

_ROW = 1024  # elements of a row of a float64 sum; part of the result's bits
_NORM_ROW = 128  # elements of a row of a float32 norm, a divisor of _ROW; part of the result's bits
_SECOND_READ_SCALE = 2.0**-540  # squares of 2**1024 become 2**968, those of 2**59 stay normal numbers
_CPU = torch.device("cpu")


@attrs.frozen(eq=False)
class GradientStats:
    """Results of one inspection; equal on all ranks that share the all_reduce."""

    numbers: tuple[float, ...]  # norm, extra and `beside` on the host, read in the one wait for the device
    num_extra: int = 0  # how many of them are `extra`
    device: torch.device = _CPU  # of the tensors below
    _tensors: tuple[Tensor, Tensor, Tensor] | None = None  # these; None: made from `numbers` when asked for

    @property
    def norm(self) -> Tensor:
        """() float64: L2 over all shards of all ranks, still scaled; inf or NaN if any element is."""
        return self._made(self.numbers[0], torch.float64) if self._tensors is None else self._tensors[0]

    @property
    def found_inf(self) -> Tensor:
        """() float32: 1 if any element on any rank is infinite or NaN, else 0."""
        return self._made(float(not self.finite), torch.float32) if self._tensors is None else self._tensors[1]

    @property
    def extra(self) -> Tensor:
        """(k,) float64: the argument `extra`, summed over ranks."""
        if self._tensors is None:
            return torch.tensor(self.numbers[1 : 1 + self.num_extra], dtype=torch.float64, device=self.device)
        return self._tensors[2]

    def _made(self, number: float, dtype: torch.dtype) -> Tensor:
        return torch.scalar_tensor(number, dtype=dtype, device=self.device)

    @property
    def finite(self) -> bool:
        """True if the step may be applied."""
        return math.isfinite(self.numbers[0])


def _no_reduction(_: Tensor) -> None:
    """Identity: the all_reduce of a world of one."""


def inspect(
    grads: Sequence[Tensor],
    *,
    all_reduce: Callable[[Tensor], object] = _no_reduction,
    extra: Tensor | Sequence[float] | None = None,
    beside: Tensor | None = None,
    squares: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> GradientStats:
    """Compute norm and finiteness of `grads` over all ranks; modifies nothing.

    grads: dense float16, bf16, float32 or float64 tensors of any shape on one device. Their union over the ranks is
        the gradient, each element once. A rank without gradients passes [], or [torch.empty(0, device=...)] if
        all_reduce needs its device. A non-contiguous tensor is copied first.
    all_reduce: sums a 1-D float64 tensor over the ranks in place; called once, and once more if the first sum is not
        finite.
    extra: (k,) or () real, or k numbers; summed over the ranks in the same call. Does not affect found_inf.
    beside: (k,) or () real on the device; numbers of this rank, read with the others in the same wait.
    squares: sums the squares of this rank's 1-D gradients, () float64, in place of the kernel or torch
        (zoptim.sum_of_squares); the norm then has its bits.

    Waits for the device once. Raises TypeError or ValueError with the index of an invalid gradient.

    >>> import torch, zprecision
    >>> stats = zprecision.inspect([torch.tensor([3.0]), torch.tensor([4.0])])
    >>> stats.norm.item(), stats.finite
    (5.0, True)
    """
    shards = _flat(grads)
    if shards and type(shards[0]) is Tensor and shards[0].device.type == "cpu":
        return _inspect_on_host(shards, all_reduce, extra, beside, squares)
    with torch.no_grad():
        extra_sums = _vector(extra).detach().reshape(-1)
        device = grads[0].device if grads else extra_sums.device
        own = _own_squares(shards, device) if squares is None else squares(shards).view(1)
        vector = torch.cat([own.to(device), extra_sums.to(device, torch.float64)])
        all_reduce(vector)
        norm = vector[0].sqrt()
        read = vector
        if beside is not None:
            read = torch.cat([vector, beside.detach().reshape(-1).to(device, torch.float64)])
        total, *others = read.tolist()
        if math.isfinite(total):
            length = math.sqrt(total)
        else:
            own = _total(_exact_squares(shards, _SECOND_READ_SCALE), device)
            all_reduce(own)
            norm = own[0].sqrt() / _SECOND_READ_SCALE
            length = norm.item()
        found_inf = torch.full((), float(not math.isfinite(length)), device=device)
    return GradientStats((length, *others), len(extra_sums), device, (norm, found_inf, vector[1:]))


def _inspect_on_host(
    shards: list[Tensor],
    all_reduce: Callable[[Tensor], object],
    extra: Tensor | Sequence[float] | None,
    beside: Tensor | None,
    squares: Callable[[Sequence[Tensor]], Tensor] | None,
) -> GradientStats:
    """Do the work of `inspect` for non-empty gradients on the CPU: the same numbers, with one small tensor."""
    own = _own_squares(shards, _CPU) if squares is None else squares(shards)
    sums = [own.item(), *_numbers(extra)]
    if all_reduce is not _no_reduction:
        vector = torch.tensor(sums, dtype=torch.float64)
        all_reduce(vector)
        sums = vector.tolist()
    if math.isfinite(sums[0]):
        norm = math.sqrt(sums[0])
    else:  # see [Note: second read]
        total = _total(_exact_squares(shards, _SECOND_READ_SCALE), _CPU)
        all_reduce(total)
        norm = (total[0].sqrt() / _SECOND_READ_SCALE).item()
    return GradientStats((norm, *sums[1:], *_numbers(beside)), len(sums) - 1)


def _vector(values: Tensor | Sequence[float] | None) -> Tensor:
    """Return numbers as a tensor."""
    return (
        values if isinstance(values, Tensor) else torch.tensor(() if values is None else values, dtype=torch.float64)
    )


def _numbers(values: Tensor | Sequence[float] | None) -> Sequence[float]:
    """Return numbers on the host."""
    if isinstance(values, Tensor):
        found: list[float] = values.reshape(-1).tolist() if values.dim() else [values.item()]
        return found
    return () if values is None else values


def merge_stats(stats: Sequence[GradientStats], device: torch.device) -> GradientStats:
    """Merge the stats of several disjoint parts of the gradients, on `device`; `extra` is that of the first part."""
    norms = torch.stack([each.norm.to(device) for each in stats])
    found = torch.stack([each.found_inf.to(device) for each in stats])
    norm = norms[0] if len(stats) == 1 else norms.square().sum().sqrt()
    tensors = norm, found.amax(), stats[0].extra.to(device)
    return GradientStats((norm.item(), *stats[0].numbers[1:]), len(tensors[2]), device, tensors)


def clip_divisor(norm: Tensor, factor: Tensor, max_norm: float) -> Tensor:
    """Return the divisor that undoes the loss scale and clips to `max_norm` at once.

    norm: () float64, L2 of the still scaled gradients; factor: () float32, their loss scale.
    Returns () float32, factor * max(1, (norm / factor + 1e-6) / max_norm), without a host sync; max_norm == 0
    disables clipping. Dividing by it equals torch.nn.utils.clip_grad_norm_ on unscaled gradients.
    Raises ValueError for a negative or NaN max_norm.

    >>> import torch, zprecision
    >>> stats = zprecision.inspect([torch.tensor([6.0, 8.0])])
    >>> round(zprecision.clip_divisor(stats.norm, torch.tensor(2.0), max_norm=1.0).item(), 3)
    10.0
    """
    if not checks.is_number(max_norm) or not max_norm >= 0:
        raise ValueError(f"clip_divisor(max_norm={max_norm!r}): pass a number >= 0; 0 disables clipping")
    if max_norm == 0:
        return factor.float()
    scale = factor.double()
    return (scale * ((norm / scale + 1e-6) / max_norm).clamp(min=1.0)).float()


def divisor_of(norm: float, factor: float, max_norm: float) -> float:
    """`clip_divisor` of host numbers: the same value, without kernel launches."""
    if max_norm == 0:
        return factor
    return factor * max(1.0, (norm / factor + 1e-6) / max_norm)


@attrs.frozen
class NonFiniteGradient:
    """The first tensor with a non-finite element."""

    name: str
    kind: Literal["nan", "inf"]  # "nan" if any element is NaN; "inf" if some are infinite and none is NaN


def first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> NonFiniteGradient | None:
    """Return the first of the (name, tensor) pairs with an infinite or NaN element; None if all are finite.

    For diagnosis after an overflow: waits for the device once per tensor. Integer tensors count as finite.
    """
    for name, tensor in named:
        values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
        if not bool(torch.isfinite(values).all()):
            return NonFiniteGradient(name, "nan" if bool(torch.isnan(values).any()) else "inf")
    return None


# --- Sums of squares: see [Note: summation of squares] ---------------------------------------------------


def _flat(grads: Sequence[Tensor]) -> list[Tensor]:
    """Flatten the non-empty gradients into 1-D views (copies where no view is possible)."""
    if all(map(_is_flat, grads)):
        return [grad for grad in grads if grad.numel()]
    for index, grad in enumerate(grads):
        if not isinstance(grad, Tensor):
            raise TypeError(f"inspect: gradient {index} is a {type(grad).__name__}; leave it out of the list")
        if hasattr(grad, "to_local"):
            raise TypeError(
                f"inspect: gradient {index} is a {type(grad).__name__}; pass its to_local(), and an all_reduce over "
                "the ranks that hold its parts"
            )
        if grad.layout != torch.strided:
            raise TypeError(f"inspect: gradient {index} is {grad.layout}; pass its coalesce().values()")
        if grad.dtype not in checks.FLOATING:
            raise TypeError(f"inspect: gradient {index} is {grad.dtype}; it must have a real floating dtype")
        if grad.device != grads[0].device:
            raise ValueError(
                f"inspect: gradient {index} is on {grad.device}, gradient 0 on {grads[0].device};"
                " inspect each device separately and merge with merge_stats()"
            )
    return [grad.detach().reshape(-1) for grad in grads if grad.numel()]


def _is_flat(grad: object) -> bool:
    """Return whether `grad` is 1-D, on the CPU, and needs no further check."""
    return (
        type(grad) is Tensor
        and grad.is_cpu
        and grad.dim() == 1
        and grad.dtype in checks.FLOATING
        and not (grad.requires_grad or grad.layout is not torch.strided)
    )


def _own_squares(shards: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares, (1,) float64: by the kernel, else by torch."""
    by_kernel = sum_of_squares(shards)
    return _total(_first_read(shards), device) if by_kernel is None else by_kernel


def _first_read(shards: list[Tensor]) -> list[Tensor]:
    """Return 1-D float64 tensors that add up to the sum of squares: by rows for whole rows, exact for the rest."""
    parts, rests = [], []
    for shard in shards:
        bulk_numel = shard.numel() // _ROW * _ROW
        parts += _row_squares(shard[:bulk_numel]) if bulk_numel else []
        rests += [shard[bulk_numel:]] if bulk_numel < shard.numel() else []
    return parts + _exact_squares(rests)


def _row_squares(bulk: Tensor) -> list[Tensor]:
    """Return 1-D float64 tensors with an element per short row of `bulk`, whose length is a multiple of a row."""
    narrow = bulk.dtype in (torch.float16, torch.bfloat16)  # these would round the norm to their few bits
    pieces = _widen([bulk], torch.float32, _chunk_numel(bulk, 2**18)) if narrow else (bulk,)
    return [torch.linalg.vector_norm(piece.view(-1, _NORM_ROW), dim=1).double().square_() for piece in pieces]


def _exact_squares(shards: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    """Return 1-D float64 tensors that add up to the sum of (scale * element)**2, every operation in float64."""
    if not shards:
        return []
    chunks = _widen(shards, torch.float64, _chunk_numel(shards[0], 2**15))
    return [chunk.mul_(scale).square_().view(-1, _ROW).sum(dim=1) for chunk in chunks]


def _widen(shards: list[Tensor], dtype: torch.dtype, limit: int) -> Iterator[Tensor]:
    """Yield the elements of all shards in order, cast to `dtype`, in chunks of `limit`; pad the last to whole rows.

    All chunks share one scratch buffer, which the caller may overwrite and must not use after the next chunk: fresh
    pages cost more than the arithmetic. Many small gradients share a chunk and its few kernels.
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
    """(1,) float64 on device: the sum of the 1-D `parts`, by rows, then by rows of those."""
    values = torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64, device=device)
    while values.numel() > _ROW:
        padding = _whole_rows(values.numel()) - values.numel()
        values = torch.nn.functional.pad(values, (0, padding)).view(-1, _ROW).sum(dim=1)
    return values.sum(dim=0, keepdim=True)


def _whole_rows(numel: int) -> int:
    """Round up to a multiple of a row."""
    return -(-numel // _ROW) * _ROW


def _chunk_numel(shard: Tensor, on_cpu: int) -> int:
    """Elements to convert at a time: as many as stay in the CPU cache; elsewhere enough to keep launches few."""
    return on_cpu if shard.device.type == "cpu" else 2**24
