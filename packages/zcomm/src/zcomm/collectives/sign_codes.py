"""Sign codes: one bit an element, eight elements a byte, with plain torch operations.

Bit i of a byte is the sign of element i of its row of eight: 1 for >= 0, so that sign(0) = +1.  Comparisons give one
byte an element; a multiplication moves the lowest bits of eight bytes, read as one integer, to the highest byte, and
no two partial products meet.  Decoding reads a table of 256 rows.

Rejected: weights 1, 2, 4, ... and a sum (reads and writes 64 bytes for each byte of the code); `numpy.packbits`
(CPU only).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["pack_signs", "unpack_signs"]

ROW = 8  # elements of a byte
_GATHER = 0x0102040810204080  # moves bit 0 of byte i to bit 56 + i
_SHIFT = 56


def pack_signs(values: Tensor) -> Tensor:
    """Return the signs of `values`, eight a byte: (n / 8,) uint8.

    values: n elements of a real dtype on any device, n a multiple of 8; read in the order of `flatten`.
    Raises ValueError if n is no multiple of 8.
    """
    if values.numel() % ROW:
        raise ValueError(f"signs are packed eight a byte; got {values.numel()} elements: pad to a multiple of {ROW}.")
    return pack_bits(values.detach().reshape(-1, ROW) >= 0)


def pack_bits(bits: Tensor) -> Tensor:
    """Return rows of eight as bytes: (rows,) uint8.  bits: (rows, 8) bool, contiguous."""
    words = bits.view(torch.uint8).view(torch.int64).view(-1)
    return (words * _GATHER >> _SHIFT).to(torch.uint8)


def unpack_signs(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return +1 and -1 for each element: (codes.numel() * 8,) of `dtype`.  codes: uint8, from `pack_signs`."""
    return rows_of(codes).view(-1).to(dtype)


def rows_of(codes: Tensor) -> Tensor:
    """Return the signs of each byte as a row: (bytes, 8) float32, new memory."""
    return _table(codes.device).index_select(0, codes.reshape(-1).int())


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Return the signs of all bytes: (256, 8) float32."""
    codes = torch.arange(256, device=device).unsqueeze(1)
    bits = (codes >> torch.arange(ROW, device=device)) & 1
    return bits.float() * 2 - 1
