"""Digests of values, for ranks to compare: of options on the host, of tensors where they lie.

`code` hashes Python values and compares numbers by value: 1, 1.0 and a tensor of 1 have one code, so have 0.0 and
-0.0, and so have all NaN.  `fingerprint` hashes the contents of a tensor without a wait for its device.  Sums wrap
around, so the order of terms has no say, and CPUs and GPUs get the same one.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["code", "fingerprint", "is_fixed", "mixed", "plain"]

SAMPLE_NUMEL = 2**14  # elements that a fingerprint looks at; of a larger tensor one in each of so many runs

_WORD = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
_NAN = 0x7FF8000000000000  # stands for every NaN
_FIXED = (float, int, bool, str, type(None))


def plain(value: Any, *, waits: bool = False) -> Any:
    """`value` as None, text, floats and lists, so that what is equal looks equal; other objects count as their class.

    waits: tensors on a device are read; else they count as their class.
    """
    if isinstance(value, (float, int)):
        return float(value) + 0.0 if value == value else "nan"
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)):
        return [plain(each, waits=waits) for each in value]
    if isinstance(value, dict):
        return [[str(key), plain(value[key], waits=waits)] for key in sorted(value, key=str)]
    if isinstance(value, Tensor) and value.device.type != "cpu" and not waits:
        return type(value).__name__
    if isinstance(value, (Tensor, np.generic, np.ndarray)):
        return plain(value.tolist())
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def code(name: str, value: Any) -> int:
    """32 bits of a named value."""
    return zlib.crc32(f"{name}={plain(value)!r}".encode())


def is_fixed(value: Any) -> bool:
    """Return whether the same object stays the same value."""
    return type(value) in _FIXED or (type(value) is tuple and all(map(is_fixed, value)))


def mixed(number: int, salt: int) -> int:
    """64 bits in which each bit of both has a say (SplitMix64, Steele et al. 2014)."""
    bits = (number + (salt + 1) * _STEP) & _WORD
    bits = ((bits ^ (bits >> 30)) * _FIRST) & _WORD
    bits = ((bits ^ (bits >> 27)) * _SECOND) & _WORD
    return bits ^ (bits >> 31)


def fingerprint(tensor: Tensor, name: str) -> Tensor:
    """() int64 on the tensor's device: a hash of name, dtype, shape and what a sample of the elements is worth.

    tensor: any; of one that is not dense, or has no memory, dtype and shape alone count.
    """
    salt = _signed(mixed(zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()), 0))
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return torch.tensor(salt)
    with torch.no_grad():
        bits = _bits(_sample(tensor.detach()))
        places = torch.arange(bits.numel(), device=bits.device)
        return _scattered(places.mul_(_signed(_STEP)).add_(salt).add_(bits)).sum() + salt


def _sample(tensor: Tensor) -> Tensor:
    """1-D: all elements, or one of each run, at a scattered place: a fixed one may be a column of padding."""
    flat = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor.flatten()
    run = math.ceil(flat.numel() / SAMPLE_NUMEL)
    if run <= 1:
        return flat
    begins = torch.arange(0, flat.numel(), run, device=flat.device)
    within = (_scattered(begins) & 0x7FFFFFFF) % run
    return flat[(begins + within).clamp_(max=flat.numel() - 1)]


def _scattered(words: Tensor) -> Tensor:
    """`mixed` of (n,) int64, but for the sign of what is shifted."""
    bits = (words ^ (words >> 30)).mul_(_signed(_FIRST))
    bits = (bits ^ (bits >> 27)).mul_(_signed(_SECOND))
    return bits ^ (bits >> 31)


def _bits(flat: Tensor) -> Tensor:
    """Int64 of each element; equal for numbers that are equal."""
    if not flat.is_floating_point():
        return flat.long()
    exact = flat.double() + 0.0  # -0.0 becomes 0.0
    return torch.where(exact.isnan(), _NAN, exact.view(torch.int64))


def _signed(word: int) -> int:
    """64 bits as torch's int64 has them."""
    return word - 2**64 if word >= 2**63 else word
