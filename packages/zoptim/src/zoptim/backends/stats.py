"""Gradient statistics: norm and finiteness of all gradients in one read.

Clipping needs the norm, loss scaling needs finiteness, and both give one divisor for the update.  So the gradients
are read once here and once in the update, and never written:

    stats = zoptim.grad_stats(p.grad for p in params)
    optimizer.grad_scale, optimizer.found_inf = stats.divisor(max_norm=1.0, loss_scale=scale), stats.found_inf
    optimizer.step()

The C kernels sum squares in float64, where squares of float32 are exact, in an order that depends only on the
tensors' sizes: the bits are the same for any number of threads and any instruction set.  Tensors that are cut or
packed differently differ by 1e-15, which a float32 divisor rounds away.

Rejected: torch's norm.  For a float32 CPU tensor of 67M elements it sums in float32 and is 0.5% too small; for bf16
it runs at 1 GB/s.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends import native
from zoptim.backends import select as backends
from zoptim.backends.contract import FORMAT_OF_DTYPE
from zoptim.backends.memory import addresses, as_dense
from zoptim.backends.native import Reader
from zoptim.backends.watch import gradients
from zoptim.checks import number

__all__ = ["GradStats", "grad_stats", "sum_of_squares"]


_kind = operator.attrgetter("layout", "dtype", "device")
_CPU = torch.device("cpu")


@attrs.frozen(eq=False)
class GradStats:
    """Norm and finiteness of gradients.  Both tensors are on the gradients' device."""

    norm: Tensor  # () float64: L2 norm over all elements; infinite or NaN if one is
    found_inf: Tensor  # () float32: 1 if any element is infinite or NaN, else 0

    def divisor(self, *, max_norm: float = 0.0, loss_scale: float | Tensor = 1.0) -> Tensor:
        """Return the `grad_scale`, () float32, that undoes `loss_scale` and clips to `max_norm` (0: no clipping).

        It is loss_scale * max(1, (norm / loss_scale + 1e-6) / max_norm), as in torch.nn.utils.clip_grad_norm_.  Does
        not synchronize with the device.  Raises TypeError or ValueError for a negative max_norm.
        """
        number("max_norm", max_norm, 0)
        if isinstance(loss_scale, (int, float)) and loss_scale > 0 and self.norm.device.type == "cpu":
            found = _divisor(self.norm.item(), float(loss_scale), max_norm)
            return torch.scalar_tensor(found, dtype=torch.float32, device=_CPU)
        scale = torch.as_tensor(loss_scale, dtype=torch.float64, device=self.norm.device)
        if max_norm == 0:
            return scale.float()
        return (scale * ((self.norm / scale + 1e-6) / max_norm).clamp(min=1.0)).float()


def _divisor(norm: float, scale: float, max_norm: float) -> float:
    """The divisor in Python: the same operations, so the same bits."""
    if max_norm == 0:
        return scale
    factor = (norm / scale + 1e-6) / max_norm
    return scale * (1.0 if factor < 1.0 else factor)  # NaN stays NaN


def grad_stats(grads: Iterable[Tensor | None]) -> GradStats:
    """Measure norm and finiteness of `grads`: dense floating tensors on one device, of any shapes; None is skipped.

    Raises TypeError or ValueError with the index of a gradient that does not fit.
    """
    found = list(grads)
    total = _fast_squares(found)
    if total is not None:
        return _stats_of(total)
    given = [grad for grad in found if grad is not None]
    kinds = _check_kinds(given)
    if given and given[0].device.type == "cuda" and backends.reason_without_kernels(given[0].device) is None:
        from zoptim.backends import gpu

        return GradStats(*gpu.grad_stats(given))
    sums = _total(given, kinds)
    return GradStats(sums.sqrt(), (~torch.isfinite(sums)).float())


def sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """Return the sum of all squared elements, () float64 on the device of `grads`, computed as in `grad_stats`.

    For ranks that hold parts of the gradients and all-reduce their sums.  Raises as `grad_stats` does.
    """
    if grads and grads[0].device.type != "cpu":
        return grad_stats(grads).norm.square()
    found = _fast_squares(list(grads))
    if found is None:
        return _total(grads, _check_kinds(grads))
    return torch.scalar_tensor(found, dtype=torch.float64, device=_CPU)


def stats_of_params(lists: Sequence[tuple[list[Tensor], list[Tensor]]]) -> GradStats:
    """Return `grad_stats` of the gradients of parameters; where one is None, of that of a weight.

    lists: for each group, parameters and weights, as in watch.py.  Makes no object for a gradient.
    """
    total = _squares_of_params(lists)
    if total is not None:
        return _stats_of(total)
    return grad_stats(grad for params, weights in lists for grad in gradients(params, weights))


def _stats_of(total: float) -> GradStats:
    """Return the statistics of gradients whose squares sum to `total`."""
    norm = torch.scalar_tensor(math.sqrt(total), dtype=torch.float64, device=_CPU)
    return GradStats(norm, torch.scalar_tensor(not math.isfinite(total), dtype=torch.float32, device=_CPU))


def _fast_squares(grads: list[Any]) -> float | None:
    """Sum the squares of contiguous CPU gradients of one dtype that has a kernel; None for others, and for none."""
    library = native.library()
    if library is None or library.reader is Reader.NONE or not grads:
        return None
    rows, numel, kind = _row_arrays(library, len(grads))
    length = library.lib.zk_rows(id(grads), rows, numel, kind)
    return _squares_at(library, kind[0], rows, numel, length) if length > 0 else None


def _squares_of_params(lists: Sequence[tuple[list[Tensor], list[Tensor]]]) -> float | None:
    """The same for the gradients of parameters."""
    library = native.library()
    if library is None or library.reader is not Reader.WORDS:
        return None
    rows, numel, kind = _row_arrays(library, sum(len(params) for params, _ in lists))
    length = 0
    for params, weights in lists:
        found = library.lib.zk_grad_rows(id(params), id(weights), rows + length, numel + length, kind)
        if found < 0:
            return None
        length += found
    return _squares_at(library, kind[0], rows, numel, length) if length else None


def _row_arrays(library: native.Library, length: int) -> tuple[Any, Any, Any]:
    """Return memory for addresses, sizes and the format of rows."""
    new = library.ffi.new
    return new("uint64_t[]", length), new("int64_t[]", length), new("int *")


def _check_kinds(given: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return (layout, dtype, device) of each gradient.  Raises unless all are dense, floating and on one device."""
    kinds = list(map(_kind, given))
    for kind in dict.fromkeys(kinds):
        _check_kind(kind, kinds.index(kind), kinds[0])
    return kinds


def _total(given: Sequence[Tensor], kinds: list[tuple[Any, ...]]) -> Tensor:
    """Sum the squares of gradients of several dtypes."""
    device = given[0].device if given else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for kind in dict.fromkeys(kinds):
        with torch.no_grad():
            total += _squares(given if kinds.count(kind) == len(given) else [g for g in given if _kind(g) == kind])
    return total


def _squares(grads: Sequence[Tensor]) -> float | Tensor:
    """Sum the squares of gradients of one dtype."""
    library = native.library() if grads[0].device.type == "cpu" else None
    if library is None or grads[0].dtype not in FORMAT_OF_DTYPE:
        return torch.stack([grad.double().square().sum() for grad in grads]).sum()
    rows = grads if all(map(Tensor.is_contiguous, grads)) else list(map(as_dense, grads))
    starts, numel = (
        library.ffi.new("uint64_t[]", addresses(rows)),
        library.ffi.new("int64_t[]", [*map(Tensor.numel, rows)]),
    )
    return _squares_at(library, FORMAT_OF_DTYPE[rows[0].dtype], starts, numel, len(rows))


def _squares_at(library: native.Library, kind: int, rows: Any, numel: Any, length: int) -> float:
    """Sum the squares of `length` rows at addresses; `kind` is a format of contract.py."""
    partials = library.ffi.new("double[]", int(library.lib.zk_num_partials(length, numel)))
    return float(library.lib.zk_squares(kind, length, rows, numel, partials, native.num_threads()))


def _check_kind(kind: tuple[Any, ...], index: int, first: tuple[Any, ...]) -> None:
    layout, dtype, device = kind
    if layout is not torch.strided or not dtype.is_floating_point:
        raise TypeError(f"gradient {index} is {layout} {dtype}; it must be dense and floating.")
    if device != first[2]:
        raise ValueError(f"gradient {index} is on {device}, gradient 0 on {first[2]}; use one device.")
