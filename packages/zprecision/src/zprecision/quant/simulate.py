"""Fake quantization: values rounded to few bits that stay floating-point tensors, for training that expects rounding.

The laws are those of DeepSpeed's compression library.  A tensor is cut into equal groups in memory order; each group
has one scale, computed from its own values (or from a given range):

| kind | bits | scale s | value |
|---|---|---|---|
| symmetric | 3 and more | 2 max abs x / 2^b | s clamp(round(x / s), -2^(b-1), 2^(b-1) - 1) |
| asymmetric | 3 and more | (max - min) / 2^b | z + s clamp(round((x - z) / s), 0, 2^b - 1), z = s round(min / s) |
| ternary | 2 | mean of the abs x above 0.7 mean abs x | -s, 0 or s; 0 up to the threshold |
| binary | 1 | mean abs x | -s or s, 0 for 0 |

`simulate_format` rounds to a `Format` instead, and gives the bits that `dequantize(quantize(x))` gives: a model that
is trained with it is the model that is served.  Its gradient includes the scale (scale_gradient.py).

A largest x above 0 loses a step of the symmetric law.

Everything is computed in float32 (float64 for float64) and rounded to the tensor's dtype once.  Gradients of
`simulate` pass straight through: d out / d x = 1 (Bengio et al. 2013).  Groups of zeros stay zeros, and groups of one
value stay unchanged where the asymmetric scale would be 0; DeepSpeed divides by 0 there.

Rejected: x + (q - x).detach() for the gradient, whose value is not q in every bit.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from zprecision.quant.formats import Format, format_named
from zprecision.quant.quantize import dequantize, quantize
from zprecision.quant.scale_gradient import through_scales

__all__ = ["QuantizerKind", "Rounding", "round_to_bits", "simulate", "simulate_format", "straight_through"]

QuantizerKind: TypeAlias = Literal["symmetric", "asymmetric"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]

MOST_BITS = 16  # 2^bits codes
TERNARY_BITS, BINARY_BITS = 2, 1


def simulate(
    x: Tensor,
    bits: int,
    *,
    groups: int = 1,
    kind: QuantizerKind = "symmetric",
    limits: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return `round_to_bits(x, bits, ...)` with the gradient passed straight through to `x`."""
    return straight_through(x, round_to_bits(x, bits, groups=groups, kind=kind, limits=limits))


def simulate_format(x: Tensor, format: Format | str) -> Tensor:
    """Return the values of `x`, (..., K), in `format`, in the dtype of `x`.

    The same bits as `dequantize(quantize(x, format))`.  The gradient passes straight through the rounding, and
    reaches the elements that set a scale (scale_gradient.py).  Raises as `quantize`.
    """
    rounded = dequantize(quantize(x, format))
    return through_scales(x, rounded, format_named(format) if isinstance(format, str) else format)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, a tensor of the shape of `x`, whose gradient is handed to `x` unchanged."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return rounded
    passed: Tensor = _StraightThrough.apply(x, rounded)  # type: ignore[no-untyped-call]
    return passed


@torch.no_grad()
def round_to_bits(
    x: Tensor,
    bits: int,
    *,
    groups: int = 1,
    kind: QuantizerKind = "symmetric",
    rounding: Rounding = "nearest",
    limits: tuple[Tensor, Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `x`, of a floating dtype on any device, rounded to `bits` bits: a new tensor of its shape and dtype.

    bits: 1 (binary) and 2 (ternary) are symmetric; 3 to 16.
    groups: parts of `x` in memory order with a scale each; a divisor of its elements.
    rounding: "nearest" (halves to even) or "stochastic", which rounds up with the probability of the remainder and is
        right on average; at 1 and 2 bits nearest always.
    limits: smallest and largest value, () tensors that replace those of `x`; for one group and at least 3 bits.
    generator: of stochastic rounding.

    Raises ValueError for other bits, kinds and groups.
    """
    check_bits(bits, kind, rounding)
    if limits is not None and (groups != 1 or bits <= TERNARY_BITS):
        raise ValueError(f"limits are of one group and at least 3 bits; these are {groups} groups, {bits} bits")
    if groups < 1 or x.numel() % groups:
        raise ValueError(
            f"groups = {groups} must divide the {x.numel()} elements of the tensor, {tuple(x.shape)}; pass a divisor"
        )
    if not x.is_floating_point():
        raise TypeError(f"the tensor is {x.dtype}; pass a floating dtype")
    if not x.numel():
        return x.clone()
    rows = x.reshape(groups, -1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if bits == TERNARY_BITS:
        rounded = _ternary(rows)
    elif bits == BINARY_BITS:
        rounded = rows.sign() * rows.abs().mean(-1, keepdim=True)
    elif kind == "symmetric":
        rounded = _symmetric(rows, bits, limits, rounding, generator)
    else:
        rounded = _asymmetric(rows, bits, limits, rounding, generator)
    return rounded.to(x.dtype).reshape(x.shape)


def check_bits(bits: int, kind: str, rounding: str = "nearest") -> None:
    """Raise ValueError for bits, a kind or a rounding that do not exist."""
    if kind not in get_args(QuantizerKind) or rounding not in get_args(Rounding):
        given, allowed = (kind, QuantizerKind) if kind not in get_args(QuantizerKind) else (rounding, Rounding)
        raise ValueError(f"{given!r}: pass one of {', '.join(map(repr, get_args(allowed)))}")
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"bits = {bits}: pass 1 (binary), 2 (ternary), or 3 to {MOST_BITS}")
    if bits <= TERNARY_BITS and kind != "symmetric":
        raise ValueError(f"bits = {bits} is symmetric; pass kind='symmetric', or at least 3 bits")


def _whole(values: Tensor, rounding: Rounding, generator: torch.Generator | None) -> Tensor:
    if rounding == "nearest":
        return values.round()
    noise = torch.rand(values.shape, dtype=values.dtype, device=values.device, generator=generator)
    return (values + noise).floor()


def _divide(values: Tensor, scale: Tensor) -> Tensor:
    """Return values / scale; 0 where the scale is 0."""
    return torch.where(scale > 0, values / scale, 0.0)


def _symmetric(
    rows: Tensor,
    bits: int,
    limits: tuple[Tensor, Tensor] | None,
    rounding: Rounding,
    generator: torch.Generator | None,
) -> Tensor:
    if limits is None:
        peak = rows.abs().amax(-1, keepdim=True)
    else:
        peak = torch.maximum(limits[0].abs(), limits[1]).to(rows.dtype).reshape(1, 1)
    scale, half = 2 * peak / 2**bits, 1 << (bits - 1)
    codes = _whole(_divide(rows, scale), rounding, generator).clamp(-half, half - 1)
    rounded: Tensor = codes * scale
    return rounded


def _asymmetric(
    rows: Tensor,
    bits: int,
    limits: tuple[Tensor, Tensor] | None,
    rounding: Rounding,
    generator: torch.Generator | None,
) -> Tensor:
    if limits is None:
        low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    else:
        low, high = (limit.to(rows.dtype).reshape(1, 1) for limit in limits)
    scale = (high - low) / 2**bits
    zero = _divide(low, scale).round() * scale
    codes = _whole(_divide(rows - zero, scale), rounding, generator).clamp(0, (1 << bits) - 1)
    return torch.where(scale > 0, codes * scale + zero, rows if limits is None else low)


def _ternary(rows: Tensor) -> Tensor:
    size = rows.abs()
    is_large = size > 0.7 * size.mean(-1, keepdim=True)
    level = (size * is_large).sum(-1, keepdim=True) / is_large.sum(-1, keepdim=True).clamp(min=1)
    return rows.sign() * is_large * level


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
