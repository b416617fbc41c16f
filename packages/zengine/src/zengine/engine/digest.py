"""Digests of values for ranks to compare: options on the host, tensors on their device.

`value_code` hashes Python values and compares numbers by value: 1, 1.0 and a tensor of 1 have one code, as do 0.0 and
-0.0, and all NaN.  `fingerprint` hashes the contents of a tensor without waiting for its device.  Sums wrap around,
so the order of terms does not matter, and CPUs and GPUs get equal results.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["fingerprint", "is_fixed", "mix", "to_plain", "value_code"]

SAMPLE_NUMEL = 2**14  # elements that a fingerprint reads; larger tensors are sampled

_WORD = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
_NAN = 0x7FF8000000000000  # representative of every NaN
_FIXED = (float, int, bool, str, type(None))


def to_plain(value: Any, *, waits: bool = False) -> Any:
    """Return `value` as None, text, floats and lists, equal for equal values; other objects become their class name.

    waits: read tensors on a device, which waits for it; otherwise they become their class name.
    """
    if isinstance(value, (float, int)):
        return float(value) + 0.0 if value == value else "nan"
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)):
        return [to_plain(each, waits=waits) for each in value]
    if isinstance(value, dict):
        return [[str(key), to_plain(value[key], waits=waits)] for key in sorted(value, key=str)]
    if isinstance(value, Tensor) and value.device.type != "cpu" and not waits:
        return type(value).__name__
    if isinstance(value, (Tensor, np.generic, np.ndarray)):
        return to_plain(value.tolist())
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def value_code(name: str, value: Any) -> int:
    """Return a 32-bit hash of a named value."""
    return zlib.crc32(f"{name}={to_plain(value)!r}".encode())


def is_fixed(value: Any) -> bool:
    """Return True if `value` is immutable."""
    return type(value) in _FIXED or (type(value) is tuple and all(map(is_fixed, value)))


def mix(number: int, salt: int) -> int:
    """Return 64 bits that depend on every bit of both numbers (SplitMix64, Steele et al. 2014)."""
    bits = (number + (salt + 1) * _STEP) & _WORD
    bits = ((bits ^ (bits >> 30)) * _FIRST) & _WORD
    bits = ((bits ^ (bits >> 27)) * _SECOND) & _WORD
    return bits ^ (bits >> 31)


def fingerprint(tensor: Tensor, name: str) -> Tensor:
    """Return a hash of name, dtype, shape and the values of a sample of elements: () int64 on the tensor's device.

    For a tensor that is not dense, or has no memory, only dtype and shape count.
    """
    salt = _signed(mix(zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()), 0))
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return torch.tensor(salt)
    with torch.no_grad():
        bits = _bits(_sample(tensor.detach()))
        positions = torch.arange(bits.numel(), device=bits.device)
        return _mix_words(positions.mul_(_signed(_STEP)).add_(salt).add_(bits)).sum() + salt


def _sample(tensor: Tensor) -> Tensor:
    """Return all elements, or one of each run at a hashed place (a fixed one might be a column of padding); 1-D."""
    flat = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.flatten()
    run = math.ceil(flat.numel() / SAMPLE_NUMEL)
    if run <= 1:
        return flat
    begins = torch.arange(0, flat.numel(), run, device=flat.device)
    within = (_mix_words(begins) & 0x7FFFFFFF) % run
    return flat[(begins + within).clamp_(max=flat.numel() - 1)]


def _mix_words(words: Tensor) -> Tensor:
    """Return `mix` of (n,) int64, except that shifts are signed."""
    bits = (words ^ (words >> 30)).mul_(_signed(_FIRST))
    bits = (bits ^ (bits >> 27)).mul_(_signed(_SECOND))
    return bits ^ (bits >> 31)


def _bits(flat: Tensor) -> Tensor:
    """Return an int64 for each element; equal for equal numbers."""
    if not flat.is_floating_point():
        return flat.long()
    exact = flat.double() + 0.0  # -0.0 becomes 0.0
    return torch.where(exact.isnan(), _NAN, exact.view(torch.int64))


def _signed(word: int) -> int:
    """Return 64 bits as a signed integer, for torch."""
    return word - 2**64 if word >= 2**63 else word
