"""Block codes of 8 and 4 bits: the error of decoded elements."""

from __future__ import annotations

import pytest
import torch

from zcomm import BlockCode

CODES = [BlockCode(bits=bits, block=block) for bits in (8, 4) for block in (8, 256)]


def _decoded(code: BlockCode, values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return code.decode(code.encode(values), torch.empty(values.shape, dtype=dtype))


def _bound(code: BlockCode, values: torch.Tensor) -> torch.Tensor:
    """Return each element's error bound: a fraction of its block's largest magnitude, and float32 rounding."""
    numel = values.numel()
    padded = torch.nn.functional.pad(values.double(), (0, -numel % code.block)).view(-1, code.block)
    largest = padded.abs().amax(dim=1, keepdim=True).expand_as(padded).reshape(-1)[:numel]
    return largest * (code.relative_error + 2.0**-22) + 1e-38


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e30])
def test_every_element_is_within_the_bound_of_its_block(code: BlockCode, scale: float) -> None:
    for numel in (1, 7, 8, 255, 256, 1000, (1 << 18) + 3):  # the last is more than one chunk
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale
        values *= torch.logspace(-2, 2, numel)  # blocks differ in size
        error = (_decoded(code, values).double() - values.double()).abs()
        assert bool((error <= _bound(code, values)).all())
        assert code.encode(values).numel() == code.num_bytes(numel)


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_bound_holds_up_to_the_largest_number(code: BlockCode, dtype: torch.dtype) -> None:
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    for top in (largest, -largest, largest * (1 - 1e-7), largest / 1.001):
        values = (torch.linspace(-1, 1, 300, dtype=torch.float64) * top).to(dtype)
        decoded = _decoded(code, values)
        assert decoded.isfinite().all()
        assert bool(((decoded.double() - values.double()).abs() <= _bound(code, values)).all())


def test_what_float32_cannot_hold_counts_as_infinite() -> None:
    values = torch.ones(16, dtype=torch.float64)
    values[3] = 1e39
    decoded = _decoded(BlockCode(block=8), values, torch.float64)
    assert decoded.isfinite().tolist() == [False] * 8 + [True] * 8


@pytest.mark.parametrize("code", CODES, ids=str)
def test_codes_come_back_as_they_were(code: BlockCode) -> None:
    """Decoded values stay exact when they are encoded again: nothing drifts."""
    once = _decoded(code, torch.randn(1000))
    assert torch.allclose(_decoded(code, once), once, rtol=2.0**-21, atol=0)
    whole = torch.arange(-code.levels, code.levels + 1).float()
    blocks = torch.cat(
        [torch.full((len(whole), 1), float(code.levels)), whole[:, None].expand(-1, 7)], dim=1
    ).reshape(-1)
    assert torch.equal(_decoded(BlockCode(bits=code.bits, block=8), blocks), blocks)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_zeros_are_exact_and_signs_are_kept(code: BlockCode) -> None:
    assert torch.equal(_decoded(code, torch.zeros(300)), torch.zeros(300))
    mixed = torch.tensor([0.0, -1.0, 1.0, 0.0])
    assert torch.equal(_decoded(code, mixed), mixed)


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_block_that_is_not_finite_arrives_not_finite(code: BlockCode, bad: float, dtype: torch.dtype) -> None:
    values = torch.ones(3 * code.block, dtype=dtype)
    values[code.block + 5] = bad
    decoded = _decoded(code, values, dtype)
    is_bad = torch.arange(len(values)) // code.block == 1
    assert not decoded[is_bad].isfinite().any()
    assert torch.equal(decoded[~is_bad], values[~is_bad])
    total = torch.zeros(len(values))
    code.add(code.encode(values), total)
    assert torch.equal(total.isfinite(), ~is_bad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_within_the_bound_and_their_own_rounding(dtype: torch.dtype) -> None:
    code = BlockCode(bits=8)
    values = torch.randn(1000).to(dtype)
    error = (_decoded(code, values, dtype).double() - values.double()).abs()
    rounding = values.double().abs().amax() * torch.finfo(dtype).eps
    assert bool((error <= _bound(code, values.float()) + rounding).all())


def test_rows_are_messages_of_their_own_and_add_adds() -> None:
    code = BlockCode(bits=4, block=16)
    rows = torch.randn(3, 20)
    message = code.encode(rows)
    assert message.shape == (3, code.num_bytes(20))
    for row, own in zip(rows, message):
        assert torch.equal(code.encode(row), own)
    total = torch.ones(3, 20)
    code.add(message, total)
    assert torch.equal(total, 1 + code.decode(message, torch.empty(3, 20)))
    assert code.encode(torch.empty(0)).numel() == 0
    assert code.decode(torch.empty(0, dtype=torch.uint8), torch.empty(0)).numel() == 0


def test_sizes_are_an_eighth_and_a_quarter_of_float32_and_the_scales() -> None:
    assert BlockCode(bits=8).num_bytes(1 << 20) == (1 << 20) * (1 + 4 / 256)
    assert BlockCode(bits=4).num_bytes(1 << 20) == (1 << 20) * (0.5 + 4 / 256)


def test_impossible_values_are_rejected() -> None:
    with pytest.raises(ValueError, match="bits"):
        BlockCode(bits=3)
    with pytest.raises(ValueError, match="multiple of 8 elements, got 12"):
        BlockCode(block=12)
    with pytest.raises(ValueError, match=r"8 bits for \[300\] elements is 520 bytes .* got \[5\] of torch.uint8"):
        BlockCode().decode(torch.empty(5, dtype=torch.uint8), torch.empty(300))
