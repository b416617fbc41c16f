"""Formats: their texts, their errors on normally distributed weights, and what they reject."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zprecision as zp

Normal = Callable[..., Tensor]

# RMS errors on N(0, 1), computed once by an independent program; the tolerance is that of its digits or of sampling.
GOLDEN = {
    "q8_0": 0.0053, "q4_0": 0.0859, "int4-amax": 0.0970, "int4-minmax": 0.0782, "int4": 0.0817, "int4-g128": 0.0967,
    "nf4": 0.0919,
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_errors_on_normal_weights_are_those_of_the_formats(name: str, normal: Normal) -> None:
    weights = normal(512, 2048)
    error = (zp.dequantize(zp.quantize(weights, name)) - weights).square().mean().sqrt().item()
    assert error == pytest.approx(GOLDEN[name], rel=0.012)


@pytest.mark.parametrize(
    ("better", "worse"), [("int4", "q4_0"), ("q4_k", "int4-minmax"), ("q6_k", "q4_k"), ("int8-search", "int8")]
)
def test_a_search_and_two_levels_are_worth_it(better: str, worse: str, normal: Normal) -> None:
    weights = normal(64, 1024)
    errors = [(zp.quantize(weights, name).dequantize() - weights).norm().item() for name in (better, worse)]
    assert errors[0] < 0.97 * errors[1]


@pytest.mark.parametrize(
    ("name", "bits"),
    [("int4", 4.5), ("int4-minmax", 5.0), ("int4-g128", 4.125), ("int8", 8.5), ("q4_k", 4.625), ("q6_k", 6.5625)],
)
def test_bits_a_weight(name: str, bits: float, normal: Normal) -> None:
    assert zp.quantize(normal(16, 1024), name).bits_per_weight == bits


def test_the_text_of_a_format_names_it(format: zp.Format) -> None:
    assert zp.format_named(zp.format_name(format)) == format


@pytest.mark.parametrize("name", ["int5", "int4-g33", "nf4-search", "q4_0-g64", "", "int4-", "int4-a16", "int8-a8"])
def test_an_unknown_text_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="names no format: use int8, int4, nf4 or fp8"):
        zp.format_named(name)


@pytest.mark.parametrize("format", [4, torch.int8, zp.Int4])
def test_what_is_no_format_is_answered_with_one(format: object, normal: Normal) -> None:
    with pytest.raises(TypeError, match=r"quantize: the format is .*; pass its text, such as 'int4', or a value"):
        zp.quantize(normal(4, 32), format)  # type: ignore[arg-type]


def test_groups_and_rules_are_checked() -> None:
    with pytest.raises(ValueError, match="group=48: pass 32, 64, 128, or None"):
        zp.Int4(group=48)
    with pytest.raises(ValueError, match="scale='best': pass one of search, amax, minmax"):
        zp.Int8(scale="best")  # type: ignore[arg-type]


def test_zeros_stay_zeros_and_tiny_values_stay_finite(format: zp.Format) -> None:
    assert not zp.quantize(torch.zeros(3, 256), format).dequantize().any()
    assert zp.quantize(torch.full((3, 256), 1e-38), format).dequantize().abs().max() < 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_rejected(format: zp.Format, value: float, normal: Normal) -> None:
    weights = normal(2, 256)
    weights[1, 7] = value
    with pytest.raises(ValueError, match="infinite or NaN"):
        zp.quantize(weights, format)


def test_values_beyond_the_scales_are_rejected_and_rows_take_them(normal: Normal) -> None:
    weights = normal(2, 64) * 1e7
    with pytest.raises(ValueError, match=r"too large for the float16 scales of int4; .* one group a row"):
        zp.quantize(weights, zp.Int4())
    assert zp.quantize(weights, zp.Int4(group=None)).dequantize().isfinite().all()


def test_integers_and_scalars_are_no_weights() -> None:
    with pytest.raises(ValueError, match=r"the tensor, \(2, 32\), is on the meta device and has no values"):
        zp.quantize(torch.empty(2, 32, device="meta"), "int8")
    with pytest.raises(TypeError, match=r"quantize: the tensor is torch\.int32"):
        zp.quantize(torch.ones(4, dtype=torch.int32), "int8")
    with pytest.raises(ValueError, match="no dims"):
        zp.quantize(torch.tensor(1.0), "int8")


def test_rows_are_quantized_by_themselves(format: zp.Format, normal: Normal) -> None:
    weights = normal(5, 3, 288)
    whole = zp.quantize(weights, format)
    row = zp.quantize(weights[4, 1], format)
    assert torch.equal(whole.dequantize()[4, 1], row.dequantize())


def test_16_bit_weights_give_their_dtype_back(normal: Normal) -> None:
    weights = normal(4, 64).bfloat16()
    quantized = zp.quantize(weights, "int8")
    assert quantized.dequantize().dtype == torch.bfloat16
    assert quantized.dequantize(torch.float32).dtype == torch.float32
    assert torch.equal(quantized.codes, zp.quantize(weights.float(), "int8").codes)
