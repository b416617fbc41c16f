"""Assumptions about torch's private API: a failure here means that a new torch changed it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zprecision._compat import has_scaled_matmul, scaled_matmul, unsaved_buffers


def test_non_persistent_buffers_are_listed() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert list(unsaved_buffers(module)) == ["scratch"]


@pytest.mark.parametrize(
    "kinds", [(torch.float8_e4m3fn, torch.float8_e4m3fn), (torch.float8_e5m2, torch.float8_e4m3fn)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scaled_product_is_the_product_of_what_the_codes_say(
    kinds: tuple[torch.dtype, torch.dtype], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(16, 32).to(kinds[0]), torch.randn(48, 32).to(kinds[1])
    scales = torch.tensor(0.5), torch.tensor(3.0)
    ours = scaled_matmul(left, right.t(), scales, dtype)
    theirs = (left.float() @ right.float().t()) * 1.5
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-5)


def test_a_cpu_is_no_device_with_8_bit_matrix_units() -> None:
    assert has_scaled_matmul(torch.device("cpu")) is False
