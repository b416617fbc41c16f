"""8-bit codec of whole tensors: by a kernel if there is one, else by torch, with the same bits.

`formats.py` defines the codes; blocks of 256 elements, in memory order, share a scale.  Second moments are stored as
square roots, which doubles their range; `is_square` hides that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoptim.backends import native
from zoptim.backends.contract import FORMAT_OF_DTYPE
from zoptim.states import formats

__all__ = ["decode", "encode"]

_SIGNED, _ROOT = 1, 2  # kinds of zk_decode and zk_encode


def decode(codes: Tensor, scales: Tensor, value: Tensor, is_square: bool) -> None:
    """Decode flat `codes` of whole blocks into `value`, float32 of the same length."""
    found = _library(codes)
    if found is not None:
        kind = _ROOT if is_square else _SIGNED
        lib, pointer = found.lib, found.ffi.cast
        lib.zk_decode(
            FORMAT_OF_DTYPE[codes.dtype], kind, *_void(pointer, codes, scales),
            pointer("float *", value.data_ptr()), codes.numel(),
        )  # fmt: skip
    else:
        value.copy_(formats.decode_root(codes, scales) if is_square else formats.decode_signed(codes, scales))
    if is_square:
        value.square_()


def encode(value: Tensor, codes: Tensor, scales: Tensor, is_square: bool, seed: int | None = None) -> None:
    """Encode flat float32 `value` into `codes` of whole blocks, rounded to nearest, or stochastically with a seed."""
    value = value.sqrt() if is_square else value
    found = _library(codes)
    if found is not None:
        kind = _ROOT if is_square else _SIGNED
        lib, pointer = found.lib, found.ffi.cast
        lib.zk_encode(
            FORMAT_OF_DTYPE[codes.dtype], kind, pointer("float *", value.data_ptr()),
            *_void(pointer, codes, scales), codes.numel(), seed or 0, seed is not None,
        )  # fmt: skip
    else:
        made, made_scales = (formats.encode_root if is_square else formats.encode_signed)(value, seed)
        codes.copy_(made)
        scales.copy_(made_scales)


def _void(pointer: Any, *tensors: Tensor) -> list[Any]:
    return [pointer("void *", tensor.data_ptr()) for tensor in tensors]


def _library(tensor: Tensor) -> native.Library | None:
    return native.library() if tensor.device.type == "cpu" else None
