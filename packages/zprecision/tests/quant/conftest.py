"""Formats and weights that the tests of quantization share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zprecision as zp

FORMATS: list[zp.Format] = [
    zp.Int8(), zp.Int8(group=None), zp.Int8(group=64, scale="minmax"), zp.Int8(group=128, scale="search"),
    zp.Int8(activation_bits=16), zp.Int8(group=64, scale="minmax", activation_bits=16),
    zp.Int4(), zp.Int4(group=64), zp.Int4(group=128, scale="amax"), zp.Int4(scale="minmax"), zp.Int4(group=None),
    zp.Q8_0(), zp.Q4_0(), zp.Q4_K(), zp.Q6_K(), zp.NF4(), zp.NF4(group=32), zp.Fp8(), zp.Fp8(group=32),
]  # fmt: skip


@pytest.fixture(params=FORMATS, ids=zp.format_name)
def format(request: pytest.FixtureRequest) -> zp.Format:
    """Every kind of format, and its options."""
    found: zp.Format = request.param
    return found


@pytest.fixture
def normal() -> Callable[..., Tensor]:
    """`normal(*shape, seed=0)`: the same values from N(0, 1) in every test."""

    def make(*shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return make
