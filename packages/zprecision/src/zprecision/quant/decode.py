"""Values of codes: the definition of every format, in torch, float32 arithmetic in a fixed order."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from zprecision.quant.formats import BLOCK, NF4, Q4_K, Q6_K, SUPER_BLOCK, Format, Fp8, integers
from zprecision.quant.layout import split_nibbles, unflatten

__all__ = ["by_group", "decode", "integer_codes", "nf4_levels", "super_scales"]


def decode(format: Format, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> Tensor:
    """Return the values as float32 of `shape`."""
    codes, scales = parts["codes"], parts["scales"]
    if isinstance(format, Q6_K):
        values = by_group(_six_bits(codes).float() - 32, super_scales(format, parts)[0])
    elif isinstance(format, Q4_K):
        steps, mins = super_scales(format, parts)
        values = by_group(integer_codes(format, codes).float(), steps, mins)
    elif isinstance(format, Fp8):
        values = by_group(codes.float(), scales)
    elif isinstance(format, NF4):
        values = by_group(nf4_levels().to(codes.device)[split_nibbles(codes).int()], scales)
    else:
        found = integers(format)
        assert found is not None
        mins = parts.get("mins")
        centred = integer_codes(format, codes).float() - found.offset
        values = by_group(centred, scales.float(), None if mins is None else mins.float())
    return values[..., : shape[-1]].contiguous()


def by_group(codes: Tensor, scales: Tensor, mins: Tensor | None = None) -> Tensor:
    """Return (..., G * g) codes times their (..., G) scales, plus their minima."""
    groups = unflatten(codes, scales.shape[-1], -1) * scales.unsqueeze(-1)
    return (groups if mins is None else groups + mins.unsqueeze(-1)).flatten(-2)


def integer_codes(format: Format, codes: Tensor) -> Tensor:
    """Return (..., K) unsigned codes, uint8: those that `Integers.offset` is subtracted from."""
    if isinstance(format, Q4_K):  # a run of 64: the first half in low nibbles, the second in high ones
        runs = unflatten(codes, -1, BLOCK)
        return torch.stack([runs & 15, runs >> 4], dim=-2).flatten(-3)
    found = integers(format)
    assert found is not None
    if found.bits == 4:
        return split_nibbles(codes)
    return codes if codes.dtype == torch.uint8 else codes.view(torch.uint8) ^ 128


def super_scales(format: Format, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the scales of Q4_K or Q6_K by group, float32, and the negated minima of Q4_K."""
    supers = parts["supers"].float()
    if isinstance(format, Q6_K):
        return by_group(parts["scales"].float(), supers), None
    steps, lows = supers[..., 0::2], supers[..., 1::2]
    return by_group(parts["scales"].float(), steps), -by_group(parts["mins"].float(), lows)


def _six_bits(codes: Tensor) -> Tensor:
    """Unpack Q6_K: for each 256 elements, 128 bytes of two low halves and 64 bytes of four upper pairs of bits."""
    blocks = unflatten(codes, -1, SUPER_BLOCK // 4 * 3)
    low = unflatten(blocks[..., :128], 2, 2, BLOCK)  # half, l or l + 32, byte
    high = unflatten(blocks[..., 128:], 2, 1, BLOCK)
    nibbles = torch.stack([low & 15, low >> 4], dim=-3)  # half, shift, l or l + 32, byte
    pairs = torch.cat([high >> 0, high >> 2, high >> 4, high >> 6], dim=-2) & 3
    return (nibbles.flatten(-3, -2) | (pairs << 4)).flatten(-4)


def nf4_levels() -> Tensor:
    """Return the 16 levels of NF4, ascending, float32, on the CPU; in new memory, which fake tensors need."""
    return torch.tensor(_nf4_levels(), dtype=torch.float32, device="cpu")


@functools.cache
def _nf4_levels() -> tuple[float, ...]:
    """Compute the levels in float64.

    Quantiles of N(0, 1) at 8 equal steps of probability up to 1 - delta above zero and 7 below, divided by the
    largest; delta keeps the outermost quantiles finite.
    """
    quantile, outermost = statistics.NormalDist().inv_cdf, 1 - (1 / 32 + 1 / 30) / 2
    upper, lower = ([quantile(outermost + (0.5 - outermost) * i / n) for i in range(n)] for n in (8, 7))
    largest = upper[0]
    return tuple(level / largest for level in (*(-level for level in lower), 0.0, *reversed(upper)))
