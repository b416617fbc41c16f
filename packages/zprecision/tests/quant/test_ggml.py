"""GGML's blocks, against decoders that read them byte by byte, as the format is described."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zprecision as zp

np: Any = pytest.importorskip("numpy")

Normal = Callable[..., Tensor]

f32 = np.float32


def half(data: bytes) -> np.float32:
    return f32(np.frombuffer(data, dtype="<f2")[0])


def decode_q8_0(block: bytes) -> list[np.float32]:
    return [half(block[:2]) * f32(code) for code in struct.unpack("32b", block[2:])]


def decode_q4_0(block: bytes) -> list[np.float32]:
    codes = [byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]
    return [half(block[:2]) * f32(code - 8) for code in codes]


def decode_q4_k(block: bytes) -> list[np.float32]:
    step, low = half(block[:2]), half(block[2:4])
    small, codes, values = block[4:16], block[16:], []
    for j in range(8):
        if j < 4:
            scale, minimum = small[j] & 63, small[j + 4] & 63
        else:
            scale = (small[j + 4] & 15) | ((small[j - 4] >> 6) << 4)
            minimum = (small[j + 4] >> 4) | ((small[j] >> 6) << 4)
        run = codes[32 * (j // 2) : 32 * (j // 2) + 32]
        quants = [byte >> 4 if j % 2 else byte & 15 for byte in run]
        values += [step * f32(scale) * f32(code) - low * f32(minimum) for code in quants]
    return values


def decode_q6_k(block: bytes) -> list[np.float32]:
    scales, step = struct.unpack("16b", block[192:208]), half(block[208:])
    values = [f32(0)] * 256
    for at in range(256):
        part, run, byte = at // 128, at % 128 // 32, at % 32
        low = block[64 * part + 32 * (run % 2) + byte] >> (4 if run >= 2 else 0) & 15
        code = low | (block[128 + 32 * part + byte] >> 2 * run & 3) << 4
        values[at] = step * f32(scales[at // 16]) * f32(code - 32)
    return values


DECODERS: dict[str, tuple[int, int, Callable[[bytes], list[np.float32]]]] = {
    "q8_0": (32, 34, decode_q8_0),
    "q4_0": (32, 18, decode_q4_0),
    "q4_k": (256, 144, decode_q4_k),
    "q6_k": (256, 210, decode_q6_k),
}
each_block = pytest.mark.parametrize("name", DECODERS)


def random_blocks(name: str, count: int) -> Tensor:
    """Any bytes are a block, if the float16 numbers in it are finite."""
    _, width, _ = DECODERS[name]
    data = torch.randint(0, 256, (count, width), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    for at in {"q8_0": (1,), "q4_0": (1,), "q4_k": (1, 3), "q6_k": (209,)}[name]:
        data[:, at] &= 0b10111011
    return data.flatten()


@each_block
def test_blocks_are_decoded_bit_for_bit_and_joined_again(name: str) -> None:
    unit, width, decode = DECODERS[name]
    data = random_blocks(name, 2 * 3 * 2)
    quantized = zp.from_blocks(data, zp.format_named(name), (2, 3, 2 * unit))
    wanted = [value for block in data.view(-1, width).tolist() for value in decode(bytes(block))]
    assert torch.equal(quantized.dequantize().flatten(), torch.tensor(np.array(wanted, dtype=f32)))
    assert torch.equal(zp.to_blocks(quantized), data)
    assert torch.equal(zp.to_blocks(quantized.narrow(2, unit, unit)), data.view(-1, 2, width)[:, 1].flatten())


def encode_q8_0(values: np.ndarray) -> bytes:
    peak = np.abs(values).max()
    step = peak / f32(127)
    inverse = f32(1) / step if step else f32(0)
    scaled = values * inverse
    exact = scaled.astype(np.float64)  # holds scaled + 0.5
    codes = np.where(exact < 0, np.ceil(exact - 0.5), np.floor(exact + 0.5))
    return np.float16(step).tobytes() + codes.astype(np.int8).tobytes()


def encode_q4_0(values: np.ndarray) -> bytes:
    peak = values[np.argmax(np.abs(values))]
    step = peak / f32(-8)
    inverse = f32(1) / step if step else f32(0)
    codes = np.minimum(15, (values * inverse + f32(8.5)).astype(np.int8)).astype(np.uint8)
    return np.float16(step).tobytes() + (codes[:16] | codes[16:] << 4).tobytes()


@pytest.mark.parametrize(("name", "encode"), [("q8_0", encode_q8_0), ("q4_0", encode_q4_0)])
def test_encoders_give_the_bytes_of_the_reference_formula(
    name: str, encode: Callable[[np.ndarray], bytes], normal: Normal
) -> None:
    weights = torch.cat([normal(200, 32), torch.arange(-16.0, 16).expand(2, 32) / 2, torch.zeros(1, 32)])
    wanted = b"".join(encode(row) for row in weights.numpy())
    assert bytes(zp.to_blocks(zp.quantize(weights, name)).tolist()) == wanted


def test_bytes_that_do_not_fit_are_rejected(normal: Normal) -> None:
    with pytest.raises(ValueError, match=r"q4_0 of \(2, 64\) has 72 bytes; .* not torch.uint8 of \(71,\)"):
        zp.from_blocks(torch.zeros(71, dtype=torch.uint8), zp.Q4_0(), (2, 64))
    with pytest.raises(ValueError, match=r"q6_k has blocks of 256 elements, and the shape is \(2, 64\)"):
        zp.from_blocks(torch.zeros(71, dtype=torch.uint8), zp.Q6_K(), (2, 64))
    with pytest.raises(ValueError, match="int4 is no format of GGML's blocks"):
        zp.to_blocks(zp.quantize(normal(2, 64), "int4"))
