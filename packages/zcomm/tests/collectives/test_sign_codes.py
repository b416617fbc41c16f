"""Sign codes: packed and unpacked, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zcomm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bit_i_of_a_byte_is_the_sign_of_element_i(dtype: torch.dtype) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[::7], values[3::11] = 0.0, -0.0
    packed = zcomm.pack_signs(values.view(64, 64))
    assert np.array_equal(packed.numpy(), np.packbits((values >= 0).numpy(), bitorder="little"))
    assert torch.equal(zcomm.unpack_signs(packed, dtype), torch.where(values >= 0, 1.0, -1.0).to(dtype))


def test_every_byte_survives() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(zcomm.pack_signs(zcomm.unpack_signs(codes)), codes)


def test_an_incomplete_byte_is_rejected() -> None:
    with pytest.raises(ValueError, match="eight a byte; got 9 elements: pad to a multiple of 8"):
        zcomm.pack_signs(torch.ones(9))
