"""Quantization of activations: 8 bits in blocks of 32 along the last dim, symmetric, at run time.

Products with integer weights multiply these codes, so that a kernel reads weights as they are stored instead of
widening them.  Formats with activations of 16 bits quantize the rest once more, and add the product of its codes.

A block with an infinite or NaN element gets the scale NaN, and so does every output it enters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zprecision.quant.encode import TINY, nearest_even
from zprecision.quant.formats import BLOCK
from zprecision.quant.layout import unflatten

__all__ = ["quantize_activations", "round_activations"]


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (..., B, 32) int8 and scales (..., B) float32 of (..., K) in any floating dtype.

    K is padded with zeros to B blocks.
    """
    padding = -x.shape[-1] % BLOCK
    blocks = unflatten(torch.nn.functional.pad(x.float(), (0, padding)), -1, BLOCK)
    peak = blocks.abs().amax(-1)
    is_finite = peak.isfinite()
    inverse = torch.where(is_finite & (peak >= TINY), torch.full_like(peak, 127.0) / peak, 0.0)
    codes = torch.where(is_finite.unsqueeze(-1), nearest_even(blocks * inverse.unsqueeze(-1)), 0.0)
    scales = torch.where(peak >= TINY, peak / 127.0, 0.0)
    return codes.to(torch.int8), torch.where(is_finite, scales, torch.nan)


def round_activations(x: Tensor, bits: int = 8) -> Tensor:
    """Return the values of the codes, float32 of the shape of `x`.

    bits: 8, or 16: the sum of the codes' values and of those of what rounding left.
    """
    x = x.float()
    codes, scales = quantize_activations(x)
    first = (codes * scales.unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]
    return first if bits == 8 else first + round_activations(x - first)
