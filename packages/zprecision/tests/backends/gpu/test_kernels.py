"""The CUDA text on a CPU: codes, values and products have the bits of the rule and of the C kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import zprecision as zp
from zprecision.backends import native
from zprecision.quant import encode, gpu
from zprecision.quant.activations import round_activations
from zprecision.quant.decode import decode

Normal = Callable[..., Tensor]
HAS_C = native.library() is not None

INTEGERS: list[zp.Format] = [
    zp.Int8(), zp.Int8(group=None), zp.Int8(group=128, scale="search"), zp.Int8(group=64, scale="minmax"),
    zp.Int4(), zp.Int4(group=128), zp.Int4(group=64, scale="amax"), zp.Int4(scale="minmax"), zp.Int4(group=None),
    zp.Int4(group=None, scale="minmax"), zp.Q8_0(), zp.Q4_0(),
]  # fmt: skip
each_format = pytest.mark.parametrize("format", INTEGERS, ids=zp.format_name)


def hard(normal: Normal, rows: int, columns: int) -> Tensor:
    """Weights with rows of zeros, of tiny numbers, of ties, of large and equal values."""
    weights = normal(rows, columns)
    weights[1], weights[2], weights[3] = 0, 1e-32, weights[3] * 3e-7
    weights[4] = torch.arange(columns) % 31 - 15.0
    weights[5], weights[6, ::3] = 3.5, -8.0
    weights[7] *= 1e4
    return weights


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_are_those_of_the_rule(
    format: zp.Format, dtype: torch.dtype, normal: Normal, shim: Any
) -> None:
    weights = hard(normal, 9, 300).to(dtype)
    wanted = encode.encode(weights, format)
    found = gpu.encode_integers(weights, format, shim)
    assert found is not None
    assert {name: part.dtype for name, part in found.items()} == {name: part.dtype for name, part in wanted.items()}
    assert all(torch.equal(found[name], part) for name, part in wanted.items())


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 3e38])
@pytest.mark.parametrize("format", [zp.Int4(), zp.Int8(scale="minmax"), zp.Q8_0()], ids=zp.format_name)
def test_values_that_have_no_scale_are_left_to_the_rule_which_explains(
    bad: float, format: zp.Format, normal: Normal, shim: Any
) -> None:
    weights = normal(3, 64)
    weights[2, 63] = bad
    assert gpu.encode_integers(weights, format, shim) is None
    assert gpu.encode_integers(weights[:2], format, shim) is not None


@each_format
@pytest.mark.parametrize(
    ("dtype", "columns"), [(torch.float32, 33), (torch.float32, 256), (torch.bfloat16, 300), (torch.float16, 65)]
)
def test_values_are_those_of_the_definition(
    format: zp.Format, dtype: torch.dtype, columns: int, normal: Normal, shim: Any
) -> None:
    parts = encode.encode(normal(3, 2, columns), format)
    wanted = decode(format, (3, 2, columns), parts).to(dtype)
    found = gpu.decode_integers(format, (3, 2, columns), parts, dtype, shim)
    assert found is not None
    assert torch.equal(found, wanted)


def cut(quantized: zp.QuantizedTensor) -> list[zp.QuantizedTensor]:
    """Views whose rows lie apart, begin late, or are not aligned to 16 bytes."""
    unit = 128
    moved = quantized.map(lambda part: torch.cat([part[:1], part]).flatten()[1:][: part.numel()].view_as(part))
    return [quantized.narrow(1, unit, 2 * unit), quantized.narrow(0, 5, 3), quantized.narrow(1, 3 * unit, 20), moved]


@each_format
def test_views_are_read_where_they_lie_and_others_copied(format: zp.Format, normal: Normal, shim: Any) -> None:
    for part in cut(zp.quantize(normal(9, 404), format)):
        found = gpu.decode_integers(format, part.shape, part.parts(), torch.float32, shim)
        assert found is not None
        assert torch.equal(found, decode(format, part.shape, part.parts()))


def matrix_of(quantized: zp.QuantizedTensor) -> gpu.DeviceMatrix:
    found = gpu.DeviceMatrix.of(quantized.format, quantized.shape, quantized.parts())
    assert found is not None
    return found


def multiplied(x: Tensor, weights: Sequence[zp.QuantizedTensor], shim: Any, *biases: Tensor | None) -> list[Tensor]:
    given = list(biases) or [None] * len(weights)
    found = gpu.products(x, [matrix_of(weight) for weight in weights], given, shim)
    assert found is not None
    return found


@pytest.mark.skipif(not HAS_C, reason="the C kernels are not built")
@each_format
@pytest.mark.parametrize("tokens", [1, 2, 19])
def test_products_have_the_bits_of_a_cpu(format: zp.Format, tokens: int, normal: Normal, shim: Any) -> None:
    weights, bias = [zp.quantize(normal(rows, 360, seed=rows), format) for rows in (37, 5)], normal(37, seed=4)
    x = normal(tokens, 360, seed=1) * 10
    x[0, :32], x[0, 40] = 0, 1e-33
    found = multiplied(x, weights, shim, bias, None)
    assert len(shim.launched) == (1 if tokens == 1 else 2)
    assert torch.equal(found[0], zp.linear(x, zp.pack(weights[0]), bias))
    assert torch.equal(found[1], zp.linear(x, zp.pack(weights[1])))


@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_the_rule(format: zp.Format, dtype: torch.dtype, normal: Normal, shim: Any) -> None:
    weight, bias = zp.quantize(normal(20, 130), format), normal(20, seed=3).to(dtype)
    x = normal(3, 130, seed=1).to(dtype)
    (found,) = multiplied(x, [weight], shim, bias)
    wanted = round_activations(x).double() @ weight.dequantize(torch.float64).T + bias.double()
    assert found.dtype == dtype
    assert torch.allclose(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.skipif(not HAS_C, reason="the C kernels are not built")
@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("name", ["int4", "int8-g64-minmax", "int4-row-minmax"])
def test_rows_of_several_chunks_are_added_in_order(name: str, tokens: int, normal: Normal, shim: Any) -> None:
    columns = 4096 + 1024 + 96
    weight, x = zp.quantize(normal(3, columns), name), normal(tokens, columns, seed=1).bfloat16()
    assert torch.equal(multiplied(x, [weight], shim)[0], zp.linear(x, zp.pack(weight)))


def test_a_launch_multiplies_sixteen_matrices_of_one_kind(normal: Normal, shim: Any) -> None:
    weights = [zp.quantize(normal(16 + k, 64, seed=k), "int4") for k in range(17)]
    weights[3], weights[4] = zp.quantize(normal(9, 64), "int8"), zp.quantize(normal(9, 64), "int4-minmax")
    x = normal(2, 64, seed=99)
    found = multiplied(x, weights, shim)
    assert [program.kernel for program, _ in shim.launched] == ["zq_activations", *["zq_products"] * 3]
    for product, weight in zip(found, weights, strict=True):
        assert torch.equal(product, multiplied(x, [weight], shim)[0])


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 32])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(tokens: int, normal: Normal, shim: Any) -> None:
    weight, x = zp.quantize(normal(18, 96), "int4-minmax"), normal(32, 96, seed=1)
    (whole,) = multiplied(x, [weight], shim)
    assert torch.equal(multiplied(x[:tokens], [weight], shim)[0], whole[:tokens])
    assert torch.equal(multiplied(x[-tokens:], [weight], shim)[0], whole[-tokens:])


def test_a_block_that_is_not_finite_makes_its_outputs_nan_and_no_others(normal: Normal, shim: Any) -> None:
    x = normal(3, 64)
    x[0, 40], x[2, 0] = torch.inf, torch.nan
    (product,) = multiplied(x, [zp.quantize(normal(8, 64), "int4")], shim)
    assert product[[0, 2]].isnan().all()
    assert product[1].isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_are_exact(bits: int, sign: int, shim: Any) -> None:
    format = zp.Int4(scale="minmax") if bits == 4 else zp.Int8(scale="minmax")
    ones = torch.ones(16, 1).half()
    weight = zp.QuantizedTensor(
        format=format, shape=(16, 32), dtype=torch.float32, scales=ones, mins=ones * 0,
        codes=torch.full((16, 32 * bits // 8), 255, dtype=torch.uint8),
    )  # fmt: skip
    (found,) = multiplied(torch.full((1, 32), 127.0 * sign), [weight], shim)
    assert found.unique().tolist() == [32 * 127 * sign * ((1 << bits) - 1)]


def test_activations_that_are_not_aligned_are_read_all_the_same(normal: Normal, shim: Any) -> None:
    weight, wide = zp.quantize(normal(8, 61), "int8"), normal(2, 61, seed=1)
    late = torch.cat([torch.zeros(1), wide.flatten()])[1:].view(2, 61)
    assert torch.equal(multiplied(late, [weight], shim)[0], multiplied(wide, [weight], shim)[0])


def test_many_tokens_are_multiplied_by_panels_of_values(
    normal: Normal, shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PANEL_NUMEL", 96 * 5)
    weight, bias, x = zp.quantize(normal(18, 96), "int4"), normal(18, seed=2), normal(40, 96, seed=1)
    found = gpu.panel_product(x, matrix_of(weight), bias, shim)
    assert found is not None
    assert [program.kernel for program, _ in shim.launched] == ["zq_dequantize"] * 4
    assert torch.allclose(found, torch.nn.functional.linear(x, weight.dequantize(), bias), atol=1e-4)


def test_what_kernels_cannot_multiply_is_left_to_torch(normal: Normal, shim: Any) -> None:
    matrix = matrix_of(zp.quantize(normal(8, 64), "int8"))
    assert gpu.products(torch.ones(33, 64), [matrix], [None], shim) is None
    assert gpu.products(torch.ones(1, 64, dtype=torch.float64), [matrix], [None], shim) is None
    assert gpu.products(torch.ones(1, 64), [matrix], [torch.ones(8, dtype=torch.float64)], shim) is None
    assert gpu.products(torch.ones(1, 64), [matrix], [None]) is None, "a CPU has no GPU kernels"
    nf4 = zp.quantize(normal(8, 64), "nf4")
    assert gpu.decode_integers(nf4.format, nf4.shape, nf4.parts(), torch.float32, shim) is None
    assert gpu.encode_integers(normal(8, 64), zp.NF4(), shim) is None


def test_no_tokens_and_no_rows_launch_nothing(normal: Normal, shim: Any) -> None:
    weight = zp.quantize(normal(16, 64), "int4")
    assert multiplied(torch.ones(0, 64), [weight], shim)[0].shape == (0, 16)
    assert multiplied(torch.ones(2, 64), [weight.narrow(0, 0, 0)], shim)[0].shape == (2, 0)
    assert not shim.launched
