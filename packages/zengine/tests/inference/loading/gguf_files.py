"""Writes GGUF files, byte by byte, and the rows of LLaMA's projections in llama.cpp's order."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zprecision.quant import Q4_0, Q4_K, Q6_K, Q8_0, quantize, to_blocks

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
FORMATS = {"Q4_0": Q4_0(), "Q8_0": Q8_0(), "Q4_K": Q4_K(), "Q6_K": Q6_K()}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def encoded(values: Tensor, kind: str) -> bytes:
    """Bytes of a tensor; a type that is not known here has zeros."""
    if kind in FORMATS:
        return to_blocks(quantize(values, FORMATS[kind])).numpy().tobytes()
    if kind == "Q4_1":
        return bytes(values.numel() // 32 * 20)
    return values.contiguous().to(PLAIN[kind]).view(torch.uint8).numpy().tobytes()


def permuted(values: Tensor, heads: int) -> Tensor:
    """Rows in the order of neighbours, as llama.cpp's converter writes them."""
    array = values.numpy().reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return torch.from_numpy(np.ascontiguousarray(array.swapaxes(1, 2)).reshape(values.shape))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return text(name) + struct.pack("<If", 6, value)
    return text(name) + struct.pack("<II", 4, value)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[Tensor, str]]) -> Path:
    """Write tensors, each in a type."""
    infos, data = b"", b""
    for name, (values, kind) in tensors.items():
        shape = tuple(values.shape)[::-1]
        infos += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, NUMBERS[kind], len(data))
        content = encoded(values, kind)
        data += content + bytes(-len(content) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(key(name, value) for name, value in metadata.items()) + infos
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path
