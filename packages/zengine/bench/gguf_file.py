"""A GGUF file of a LLaMA with random weights, for llama.cpp beside decode.py.  All blocks have the same values.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3.  The vocabulary is made up: three
control tokens, 256 bytes, and words that no text contains.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from zprecision import quantize
from zprecision.quant import Q4_0, Q8_0, to_blocks

__all__ = ["FORMATS", "write_llama"]

FORMATS = {"int4": "q4_0", "int8": "q8_0"}  # that stand beside ours
_FLOAT32, _ALIGNMENT = 0, 32
_TYPES = {"q4_0": 2, "q8_0": 8}
_FILE_TYPES = {"q4_0": 2, "q8_0": 7}
_NAMES = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down",
}  # fmt: skip
Value = int | float | str | list[str] | list[float] | list[int]


def write_llama(
    path: Path,
    format: str,
    layers: int,
    shapes: Mapping[str, tuple[int, int]],
    heads: tuple[int, int],
    vocabulary: int,
) -> None:
    """Write a model.  shapes: of the matrices of a block by the names of decode.py; heads: of queries and keys."""
    width, grown = shapes["down"]
    generator = torch.Generator().manual_seed(0)

    def made(shape: tuple[int, int]) -> Tensor:
        values = torch.randn(*shape, generator=generator) * 0.02
        return to_blocks(quantize(values, Q4_0() if format == "q4_0" else Q8_0()))

    block = {f"{_NAMES[name]}.weight": (shape, _TYPES[format], made(shape)) for name, shape in shapes.items()}
    ones = ((width,), _FLOAT32, torch.ones(width).view(torch.uint8))
    block |= {"attn_norm.weight": ones, "ffn_norm.weight": ones}
    table = ((vocabulary, width), _TYPES[format], made((vocabulary, width)))
    tensors = {"token_embd.weight": table, "output_norm.weight": ones, "output.weight": table}
    tensors |= {f"blk.{index}.{name}": each for index in range(layers) for name, each in block.items()}
    fields: dict[str, Value] = {
        "general.architecture": "llama",
        "general.file_type": _FILE_TYPES[format],
        "llama.context_length": 2048,
        "llama.embedding_length": width,
        "llama.block_count": layers,
        "llama.feed_forward_length": grown,
        "llama.attention.head_count": heads[0],
        "llama.attention.head_count_kv": heads[1],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": width // heads[0],
        "llama.vocab_size": vocabulary,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": _tokens(vocabulary),
        "tokenizer.ggml.scores": [0.0] * vocabulary,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (vocabulary - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    with path.open("wb") as file:
        _write(file, fields, tensors)


def _tokens(count: int) -> list[str]:
    return [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(f"w{k}" for k in range(259, count)),
    ]


def _write(
    file: BinaryIO, fields: Mapping[str, Value], tensors: Mapping[str, tuple[Sequence[int], int, Tensor]]
) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
    for name, value in fields.items():
        file.write(_text(name) + _value(value))
    offset = 0
    for name, (shape, kind, data) in tensors.items():
        file.write(_text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape)))
        file.write(struct.pack("<IQ", kind, offset))
        offset += _padded(data.nbytes)
    file.write(bytes(_padded(file.tell()) - file.tell()))
    for _, _, data in tensors.values():
        file.write(data.numpy())
        file.write(bytes(_padded(data.nbytes) - data.nbytes))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Value) -> bytes:
    if isinstance(value, list):
        code = {int: 5, float: 6, str: 8}[type(value[0])]
        return struct.pack("<IIQ", 9, code, len(value)) + b"".join(_plain(each) for each in value)
    return struct.pack("<I", {int: 4, float: 6, str: 8}[type(value)]) + _plain(value)


def _plain(value: float | str) -> bytes:
    if isinstance(value, str):
        return _text(value)
    return struct.pack("<f" if isinstance(value, float) else "<i", value)
