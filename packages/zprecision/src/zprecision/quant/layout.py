"""Parts of quantized tensors: names, lengths, dtypes, and the order of codes in bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zprecision.quant.formats import BLOCK, Q4_K, Q6_K, SUPER_BLOCK, Format, Fp8, integers, unit_of

__all__ = ["PARTS", "join_nibbles", "padded", "part_dtypes", "part_lengths", "split_nibbles", "unflatten"]

PARTS = ("codes", "scales", "mins", "supers")


def unflatten(values: Tensor, *sizes: int) -> Tensor:
    """Return `values.unflatten(-1, sizes)`, where one size may be -1 even if a leading dim is empty."""
    known = math.prod(size for size in sizes if size != -1)
    filled = [values.shape[-1] // max(1, known) if size == -1 else size for size in sizes]
    return values.reshape(*values.shape[:-1], *filled)


def join_nibbles(codes: Tensor) -> Tensor:
    """Pack (..., 32n) uint8 codes below 16 into (..., 16n) bytes: j and j + 16 of a run of 32 share byte j."""
    runs = unflatten(codes, -1, 2, BLOCK // 2)
    return (runs[..., 0, :] | (runs[..., 1, :] << 4)).flatten(-2)


def split_nibbles(packed: Tensor) -> Tensor:
    """Unpack the (..., 16n) bytes of `join_nibbles` into (..., 32n) uint8 codes."""
    runs = unflatten(packed, -1, BLOCK // 2)
    return torch.stack([runs & 15, runs >> 4], dim=-2).flatten(-3)


def padded(format: Format, length: int) -> int:
    """Return the length of a row with its padding."""
    unit = unit_of(format)
    return -(-length // unit) * unit


def part_lengths(format: Format, length: int) -> dict[str, int]:
    """Return the last dim of every part, for rows of `length` elements."""
    whole = padded(format, length)
    if isinstance(format, Q4_K):
        blocks = whole // SUPER_BLOCK
        return {"codes": whole // 2, "scales": whole // BLOCK, "mins": whole // BLOCK, "supers": 2 * blocks}
    if isinstance(format, Q6_K):
        return {"codes": whole // 4 * 3, "scales": whole // 16, "supers": whole // SUPER_BLOCK}
    found = integers(format)
    group = found.group if found else format.group  # type: ignore[union-attr]
    groups = whole // group if group else 1
    codes = whole if isinstance(format, Fp8) or (found and found.bits == 8) else whole // 2
    return {"codes": codes, "scales": groups, **({"mins": groups} if found and not found.is_symmetric else {})}


def part_dtypes(format: Format) -> dict[str, torch.dtype]:
    """Return the dtype of every part that `format` can have."""
    if isinstance(format, Q4_K):
        return dict.fromkeys(("codes", "scales", "mins"), torch.uint8) | {"supers": torch.float16}
    if isinstance(format, Q6_K):
        return {"codes": torch.uint8, "scales": torch.int8, "supers": torch.float16}
    if isinstance(format, Fp8):
        return {"codes": torch.float8_e4m3fn, "scales": torch.float32}
    found = integers(format)
    if found is None:
        return {"codes": torch.uint8, "scales": torch.float32}
    scales = torch.float16 if found.group else torch.float32  # one scale a row costs nothing
    codes = torch.int8 if found.bits == 8 and found.is_symmetric else torch.uint8
    return {"codes": codes, "scales": scales, "mins": scales}
