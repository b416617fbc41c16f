"""Dtype names of safetensors."""

from __future__ import annotations

import torch

from zckpt.errors import CheckpointInputError

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name.  Raises CheckpointInputError for a dtype that the format does not support."""
    if dtype not in _NAMES:
        allowed = ", ".join(str(each).removeprefix("torch.") for each in _NAMES)
        raise CheckpointInputError(f"dtype {dtype} cannot be stored in safetensors; allowed: {allowed}")
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype | None:
    """The torch dtype of a safetensors name; None if unknown."""
    return _DTYPES.get(name)
