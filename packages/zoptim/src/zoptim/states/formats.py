"""Number formats of weights and moments, in torch: the reference of csrc/zk_math.h, bit for bit.

Used where there is no kernel, and to convert state between formats.  Functions accept tensors of any shape on any
device; integers are int64 because torch has no shifts on uint32.

Stochastic rounding (Gupta et al. 2015) adds noise below the kept bits and truncates, so the mean of many roundings is
the value.  The noise is a hash of the value's bits and a seed: independent of cuts, resumes and devices, without a
generator state to save.  Equal values are rounded alike within a step and differently in the next.

8-bit codes: a magnitude over the largest of its 256 elements, y, becomes the upper bits of the float32
t = y * (1 - c) + c, c = 2**-15: MANTISSA bits per binade where y is well above c, evenly spaced near 0.  The top code
is exactly 1, so code -> float32 -> code is the identity.  Rejected: a lookup table (dynamic tree quantization,
Dettmers et al. 2022), which costs a search per element instead of a shift.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

__all__ = [
    "StateFormat",
    "decode_root",
    "decode_signed",
    "encode_root",
    "encode_signed",
    "join",
    "seed_of",
    "split",
    "to_bf16_stochastic",
]

_MASK = 0xFFFFFFFF
_BLOCK = 256  # elements that share a scale
_C = 2.0**-15
_C_EXPONENT = 112  # its exponent field
_TINY = 1e-37  # a block whose largest magnitude is smaller has scale 0
_SIGNED_MANTISSA, _ROOT_MANTISSA = 3, 4


class StateFormat(enum.Enum):
    """The format of moments; values are the spellings in a config."""

    FP32 = "fp32"
    BF16 = "bf16"  # stochastically rounded
    FP16 = "fp16"  # rounded to nearest, as torch keeps the state of float16 parameters
    INT8 = "8bit"  # codes of 8 bits, a float32 scale per 256 elements

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the state tensor."""
        return _DTYPES[self]

    @property
    def bytes_per_element(self) -> float:
        """Bytes of one element of one moment, scales included."""
        return 1 + 4 / _BLOCK if self is StateFormat.INT8 else float(self.dtype.itemsize)

    @classmethod
    def parse(cls, value: object) -> StateFormat | None:
        """Parse a user's value; None follows the parameter's dtype.  Raises ValueError for unknown values."""
        if value is None or isinstance(value, cls):
            return value
        key = value.lower() if isinstance(value, str) else value
        for member, names in _NAMES.items():
            if key in names:
                return member
        raise ValueError(
            f"state_dtype is {value!r}; it must be None (as the parameter), "
            '"fp32", "bf16", "fp16", "8bit", or torch.float32, torch.bfloat16, torch.float16.'
        )


_DTYPES = {
    StateFormat.FP32: torch.float32,
    StateFormat.BF16: torch.bfloat16,
    StateFormat.FP16: torch.float16,
    StateFormat.INT8: torch.uint8,
}
_NAMES: dict[StateFormat, tuple[object, ...]] = {
    StateFormat.FP32: ("fp32", "float32", torch.float32),
    StateFormat.BF16: ("bf16", "bfloat16", torch.bfloat16),
    StateFormat.FP16: ("fp16", "float16", torch.float16),
    StateFormat.INT8: ("8bit", "int8", "uint8", torch.uint8, torch.int8),
}


# Noise ------------------------------------------------------------------------------------------------


def seed_of(step: int, stream: int) -> int:
    """Return the seed of stream `stream` (0: weight, 1 to 3: moments) at update number `step`."""
    mixed = _mix_int((step * 0x9E3779B9 + stream * 0x85EBCA6B + 1) & _MASK)
    return mixed ^ (mixed >> 16)


def to_bf16_stochastic(value: Tensor, seed: int) -> Tensor:
    """Round `value` (float32) stochastically to bf16; the expectation is the value."""
    bits = _bits(value)
    is_nan = ((bits << 1) & _MASK) > 0xFF000000
    added = torch.where(is_nan, 0, _noise(bits, seed) >> 16)
    return _as_int16(((bits + added) & _MASK) >> 16).view(torch.bfloat16)


# Split master -----------------------------------------------------------------------------------------


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 into (bf16, int16): the value rounded half up, and the exact remainder.

    NaN stays NaN, with other bits.
    """
    bits = _bits(value)
    is_nan = ((bits << 1) & _MASK) > 0xFF000000
    high = ((bits + torch.where(is_nan, 0, 0x8000)) & _MASK) >> 16
    return _as_int16(high).view(torch.bfloat16), _as_int16(bits & 0xFFFF)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Invert `split`, bit for bit."""
    bits = (high.view(torch.int16).long() << 16) + low.long()
    return _as_float(bits & _MASK)


# 8-bit codes ------------------------------------------------------------------------------------------


def encode_signed(value: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Encode float32 as (uint8 codes of its shape, (ceil(numel / 256),) float32 scales).

    Rounds to nearest, or stochastically with a seed.
    """
    bits = _bits(value)
    code, scales = _encode(bits & 0x7FFFFFFF, bits, seed, _SIGNED_MANTISSA)
    return (code | ((bits >> 31) << 7)).to(torch.uint8), scales


def decode_signed(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode the codes of `encode_signed` to float32."""
    magnitude = _decode(codes.long() & 127, scales, _SIGNED_MANTISSA)
    return torch.where(codes > 127, -magnitude, magnitude)


def encode_root(root: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Encode square roots of second moments (>= 0), see encode_signed.  A positive root never becomes 0."""
    bits = _bits(root)
    code, scales = _encode(bits, bits, seed, _ROOT_MANTISSA)
    return torch.where((code == 0) & (root > 0), 1, code).to(torch.uint8), scales


def decode_root(codes: Tensor, scales: Tensor) -> Tensor:
    """Decode the codes of `encode_root` to float32 roots."""
    return _decode(codes.long(), scales, _ROOT_MANTISSA)


def _encode(magnitude: Tensor, bits: Tensor, seed: int | None, mantissa: int) -> tuple[Tensor, Tensor]:
    shift = 23 - mantissa
    blocks = torch.nn.functional.pad(magnitude.reshape(-1), (0, -magnitude.numel() % _BLOCK)).view(-1, _BLOCK)
    largest = _as_float(blocks.amax(dim=1)) if magnitude.numel() else torch.zeros(0, device=bits.device)
    factor = torch.where(largest < _TINY, 0.0, (1.0 / largest) * 1.0000002384185791)
    y = _as_float(magnitude) * _per_element(factor, magnitude)
    t = torch.where(y < 1.0, y, 1.0) * (1.0 - _C) + _C
    noise = 1 << (shift - 1) if seed is None else _noise(bits, seed) >> (32 - shift)
    code = ((_bits(t) + noise) >> shift) - (_C_EXPONENT << mantissa)
    return code, torch.where(largest < _TINY, 0.0, largest)


def _decode(code: Tensor, scales: Tensor, mantissa: int) -> Tensor:
    y = _as_float((code + (_C_EXPONENT << mantissa)) << (23 - mantissa)) - _C
    return y * 1.000030517578125 * _per_element(scales, code)


def _per_element(per_block: Tensor, like: Tensor) -> Tensor:
    return per_block.repeat_interleave(_BLOCK)[: like.numel()].view(like.shape)


# Bits -------------------------------------------------------------------------------------------------


def _mix_int(x: int) -> int:
    x = (x * 0x7FEB352D) & _MASK
    x ^= x >> 15
    return (x * 0x846CA68B) & _MASK


def _noise(bits: Tensor, seed: int) -> Tensor:
    x = _times(bits ^ seed, 0x7FEB352D)
    x = x ^ (x >> 15)
    return _times(x, 0x846CA68B)


def _times(x: Tensor, factor: int) -> Tensor:
    """Return x * factor modulo 2**32, computed in halves so that int64 does not overflow."""
    return (x * (factor & 0xFFFF) + (((x * (factor >> 16)) & 0xFFFF) << 16)) & _MASK


def _bits(value: Tensor) -> Tensor:
    """Return the bits of float32 values, as int64 in [0, 2**32)."""
    return value.float().contiguous().view(torch.int32).long() & _MASK


def _as_float(bits: Tensor) -> Tensor:
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def _as_int16(bits: Tensor) -> Tensor:
    """Return 16 bits in [0, 2**16) as the int16 with the same bits."""
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)
