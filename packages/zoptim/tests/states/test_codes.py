"""8-bit codes of tensors: kernels and torch give the same bits."""

from __future__ import annotations

import pytest
import torch

from zoptim.backends import native
from zoptim.states.codes import decode, encode


@pytest.mark.parametrize("is_square", [False, True])
@pytest.mark.parametrize("seed", [None, 12345])
@pytest.mark.parametrize("numel", [1, 256, 1000])
def test_kernels_and_torch_make_the_same_codes(
    is_square: bool, seed: int | None, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    values = values.square() if is_square else values
    found = []
    for without in (False, True):
        if without:
            monkeypatch.setattr(native, "library", lambda: None)
        codes, scales, back = torch.empty(numel, dtype=torch.uint8), torch.empty(-(-numel // 256)), torch.empty(numel)
        encode(values.clone(), codes, scales, is_square, seed)
        decode(codes, scales, back, is_square)
        found.append((codes, scales, back))
    assert all(map(torch.equal, *found))
    largest = float(values.abs().max())
    assert (found[0][2] - values).abs().max() <= (1 / 8 if seed is None else 1 / 4) * largest


def test_arguments_are_not_written() -> None:
    values = torch.rand(300)
    kept = values.clone()
    encode(values, torch.empty(300, dtype=torch.uint8), torch.empty(2), is_square=True)
    assert torch.equal(values, kept)
