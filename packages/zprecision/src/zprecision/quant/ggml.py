"""Blocks of GGML files: raw bytes to and from quantized tensors, without loss.

A file stores a tensor row by row, block by block; each block has its scales beside its codes.  `from_blocks` parts
them, `to_blocks` joins them again to the same bytes.  Both work on bytes only: reading a file is the caller's part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zprecision.quant.formats import BLOCK, Q4_0, Q4_K, Q6_K, Q8_0, SUPER_BLOCK, Format, format_name, unit_of
from zprecision.quant.layout import unflatten
from zprecision.quant.tensor import QuantizedTensor, checked

__all__ = ["from_blocks", "to_blocks"]

_BLOCK_BYTES: dict[type, int] = {Q8_0: 34, Q4_0: 18, Q4_K: 144, Q6_K: 210}


def from_blocks(
    data: Tensor, format: Format, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> QuantizedTensor:
    """Return the tensor of `shape` whose blocks are `data`, a 1-D uint8 tensor in the order of a GGUF file.

    format: Q8_0, Q4_0, Q4_K or Q6_K. dtype: of the values that `dequantize` returns. Raises ValueError if the number
    of bytes does not fit, or a row has no whole number of blocks.
    """
    width, unit = _block_bytes(format), unit_of(format)
    shape = tuple(int(size) for size in shape)
    if not shape or shape[-1] % unit:
        raise ValueError(f"{format_name(format)} has blocks of {unit} elements, and the shape is {shape}")
    wanted = width
    for size in (*shape[:-1], shape[-1] // unit):
        wanted *= size
    if data.dtype != torch.uint8 or data.dim() != 1 or data.numel() != wanted:
        raise ValueError(
            f"{format_name(format)} of {shape} has {wanted} bytes; pass them as a 1-D uint8 tensor, and not "
            f"{data.dtype} of {tuple(data.shape)}"
        )
    blocks = data.view(*shape[:-1], shape[-1] // unit, width)
    return checked(format, shape, dtype, {name: part.flatten(-2) for name, part in _part(blocks, format).items()})


def to_blocks(quantized: QuantizedTensor) -> Tensor:
    """Return the blocks of a tensor in Q8_0, Q4_0, Q4_K or Q6_K, 1-D uint8, as a GGUF file has them.

    Raises ValueError for another format.
    """
    format, unit = quantized.format, unit_of(quantized.format)
    _block_bytes(format)
    num_blocks = -(-quantized.shape[-1] // unit)
    parts = {name: unflatten(part, num_blocks, -1) for name, part in quantized.parts().items()}
    return _join(parts, format).flatten()


def _block_bytes(format: Format) -> int:
    if type(format) not in _BLOCK_BYTES:
        raise ValueError(f"{format_name(format)} is no format of GGML's blocks: use q8_0, q4_0, q4_k or q6_k")
    return _BLOCK_BYTES[type(format)]


def _halves(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _part(blocks: Tensor, format: Format) -> dict[str, Tensor]:
    """Part (..., blocks, bytes) by name; every part has the dim of blocks."""
    if isinstance(format, Q6_K):
        codes, scales, supers = torch.split(blocks, [SUPER_BLOCK // 4 * 3, SUPER_BLOCK // 16, 2], dim=-1)
        return {"codes": codes, "scales": scales.contiguous().view(torch.int8), "supers": _halves(supers)}
    if isinstance(format, Q4_K):
        supers, small, codes = torch.split(blocks, [4, 12, SUPER_BLOCK // 2], dim=-1)
        scales, mins = _six_bit_pairs(small)
        return {"codes": codes, "scales": scales, "mins": mins, "supers": _halves(supers)}
    codes = blocks[..., 2:]
    stored = codes.contiguous().view(torch.int8) if isinstance(format, Q8_0) else codes
    return {"codes": stored, "scales": _halves(blocks[..., :2])}


def _join(parts: dict[str, Tensor], format: Format) -> Tensor:
    codes, scales = _bytes(parts["codes"]), parts["scales"]
    if isinstance(format, Q6_K):
        return torch.cat([codes, _bytes(scales), _bytes(parts["supers"])], dim=-1)
    if isinstance(format, Q4_K):
        return torch.cat([_bytes(parts["supers"]), _twelve_bytes(scales, parts["mins"]), codes], dim=-1)
    return torch.cat([_bytes(scales), codes], dim=-1)


def _six_bit_pairs(small: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 minima in 12 bytes of Q4_K."""
    first, second, mixed = torch.split(small, 4, dim=-1)
    scales = torch.cat([first & 63, (mixed & 15) | ((first >> 6) << 4)], dim=-1)
    mins = torch.cat([second & 63, (mixed >> 4) | ((second >> 6) << 4)], dim=-1)
    return scales, mins


def _twelve_bytes(scales: Tensor, mins: Tensor) -> Tensor:
    half = SUPER_BLOCK // BLOCK // 2
    first = scales[..., :half] | ((scales[..., half:] >> 4) << 6)
    second = mins[..., :half] | ((mins[..., half:] >> 4) << 6)
    return torch.cat([first, second, (scales[..., half:] & 15) | ((mins[..., half:] & 15) << 4)], dim=-1)
