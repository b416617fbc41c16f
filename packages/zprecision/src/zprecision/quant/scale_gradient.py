"""Gradient of fake quantization to a format, with that of the scale.

A group of weights x is rounded to y = s round(x / s), and its scale s follows from x.  With the rounding taken as the
identity (Bengio et al. 2013),

    dy_j = dx_j + (y_j - x_j) d log s        (the step size of Esser et al. 2020, for a scale that is computed)

so the gradient g of y gives x, beside g itself, e d log s / dx with e = sum_j g_j (y_j - x_j) over the group:

| scale | d log s / dx |
|---|---|
| of the largest magnitude x_k: amax, NF4, Fp8, Q8_0, Q4_0 | 1 / x_k at k, else 0 |
| of the range: minmax | 1 / (max - min) at the largest, -1 / (max - min) at the smallest, else 0 |
| least squares: search | y / sum y^2 |

Without the second term an outlier never learns that it makes the whole group coarse.  Values that are clipped keep
their gradient, so that they can return.  Q4_K and Q6_K, whose scales are rounded themselves, pass g alone.

Everything is computed in float32 and added to g in its dtype.  Of equal magnitudes the first sets the scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zprecision.quant.formats import Q4_K, Q6_K, Format, integers
from zprecision.quant.layout import padded, part_lengths, unflatten

__all__ = ["scale_gradient", "through_scales"]


def through_scales(x: Tensor, rounded: Tensor, format: Format) -> Tensor:
    """Return `rounded`, the values of `x` in `format`, with the gradient of rounding and scale."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return rounded
    passed: Tensor = _ThroughScales.apply(x, rounded, format)  # type: ignore[no-untyped-call]
    return passed


def scale_gradient(grad: Tensor, x: Tensor, rounded: Tensor, format: Format) -> Tensor:
    """Return the gradient of `x`, (..., K), that comes from the scales: float32; `grad` is that of `rounded`."""
    length = x.shape[-1]
    groups = part_lengths(format, length)["scales"]
    missing = padded(format, length) - length
    runs, values, slopes = (
        unflatten(torch.nn.functional.pad(each.detach().float(), (0, missing)), groups, -1)
        for each in (x, rounded, grad)
    )
    error = (slopes * (values - runs)).sum(-1, keepdim=True)
    return (error * _log_scale_slope(runs, values, format)).flatten(-2)[..., :length]


def _log_scale_slope(runs: Tensor, values: Tensor, format: Format) -> Tensor:
    """Return d log s / dx of groups (..., G, g); 0 for groups of zeros, and of subnormal numbers."""
    found = integers(format)
    rule = found.scale if found is not None else "amax"
    if rule == "search":
        return _divided(values, values.square().sum(-1, keepdim=True))
    if rule == "minmax":
        (low, first), (high, last) = runs.min(-1, keepdim=True), runs.max(-1, keepdim=True)
        slope = _divided(torch.ones_like(low), high - low)
        return torch.zeros_like(runs).scatter_add_(-1, last, slope).scatter_add_(-1, first, -slope)
    first = runs.abs().argmax(-1, keepdim=True)
    peak = runs.gather(-1, first)
    return torch.zeros_like(runs).scatter_(-1, first, _divided(torch.ones_like(peak), peak))


def _divided(values: Tensor, by: Tensor) -> Tensor:
    """Return values / by; 0 where `by` is 0 or subnormal, since the quotient may overflow there."""
    return torch.where(by.abs() >= torch.finfo(by.dtype).tiny, values / by, 0.0)


class _ThroughScales(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor, format: Format) -> Tensor:
        ctx.format = format
        ctx.save_for_backward(x, rounded)
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        if isinstance(ctx.format, Q4_K | Q6_K):
            return grad, None, None
        x, rounded = ctx.saved_tensors
        return grad + scale_gradient(grad, x, rounded, ctx.format).to(grad.dtype), None, None
