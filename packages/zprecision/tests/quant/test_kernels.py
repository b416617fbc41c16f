"""The C kernels against the torch rule and a scalar emulation, bit for bit, at every level that runs here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import zprecision as zp
from zprecision.backends import native
from zprecision.quant import encode, kernels
from zprecision.quant.activations import round_activations
from zprecision.quant.formats import Integers, integers
from zprecision.quant.panels import pack_rule

np: Any = pytest.importorskip("numpy")

Normal = Callable[..., Tensor]
f32 = np.float32

LIBRARY = native.library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the kernels are not built")
LEVELS = () if LIBRARY is None else LIBRARY.levels
each_level = pytest.mark.parametrize("level", LEVELS)

INTEGERS: list[zp.Format] = [
    zp.Int8(), zp.Int8(group=None), zp.Int8(group=128, scale="search"), zp.Int8(group=64, scale="minmax"),
    zp.Int4(), zp.Int4(group=128), zp.Int4(group=64, scale="amax"), zp.Int4(scale="minmax"), zp.Int4(group=None),
    zp.Int4(group=None, scale="minmax"), zp.Q8_0(), zp.Q4_0(), zp.Int8(activation_bits=16),
    zp.Int8(group=64, scale="minmax", activation_bits=16), zp.Int8(group=None, activation_bits=16),
]  # fmt: skip
each_integer_format = pytest.mark.parametrize("format", INTEGERS, ids=zp.format_name)


def form_of(format: zp.Format) -> Integers:
    form = integers(format)
    assert form is not None
    return form


def hard(normal: Normal, rows: int, columns: int) -> Tensor:
    """Weights with rows of zeros, of tiny numbers, of ties, of large and equal values."""
    weights = normal(rows, columns)
    weights[1], weights[2], weights[3] = 0, 1e-32, weights[3] * 3e-7
    weights[4] = torch.arange(columns) % 31 - 15.0
    weights[5], weights[6, ::3] = 3.5, -8.0
    weights[7] *= 1e4
    return weights


@each_level
@each_integer_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_are_those_of_the_rule(
    level: str, format: zp.Format, dtype: torch.dtype, normal: Normal
) -> None:
    weights = hard(normal, 12, 300).to(dtype)
    wanted = encode.encode(weights, format)
    with native.use_level(level):
        found = kernels.encode_integers(weights, format)
    assert found is not None
    assert all(torch.equal(found[name], part) for name, part in wanted.items())


@each_level
@each_integer_format
def test_panels_are_those_of_the_rule(level: str, format: zp.Format, normal: Normal) -> None:
    quantized = zp.quantize(normal(37, 200), format)
    wanted = pack_rule(quantized, form_of(format))
    with native.use_level(level):
        found = zp.pack(quantized)
    assert isinstance(found, zp.PackedTensor)
    assert torch.equal(found.data, wanted)


def emulated(x: Tensor, quantized: zp.QuantizedTensor) -> np.ndarray:
    """Return the product in float32 scalars, in the order that zq_kern.c promises."""
    found = emulated_part(x, quantized)
    if form_of(quantized.format).activation_bits == 8:
        return found
    return found + emulated_part(x - round_activations(x), quantized)


def emulated_part(x: Tensor, quantized: zp.QuantizedTensor) -> np.ndarray:
    codes, scales = zp.quantize_activations(x)
    form = form_of(quantized.format)
    mins = None if quantized.mins is None else torch.zeros_like(quantized.mins)
    centred = attrs.evolve(quantized, scales=torch.ones_like(quantized.scales), mins=mins)
    weights = centred.dequantize(torch.int64).numpy()
    group_blocks = (form.group or -(-x.shape[1] // 32) * 32) // 32
    out = np.zeros((x.shape[0], weights.shape[0]), dtype=f32)
    padded = np.zeros((weights.shape[0], codes.shape[1] * 32), dtype=np.int64)
    padded[:, : weights.shape[1]] = weights
    for token in range(x.shape[0]):
        sums = np.einsum("nbk,bk->nb", padded.reshape(len(padded), -1, 32), codes[token].long().numpy())
        inputs = codes[token].long().sum(-1).numpy()
        for first in range(0, codes.shape[1], group_blocks):
            part, low = np.zeros(len(padded), dtype=f32), f32(0)
            for block in range(first, min(first + group_blocks, codes.shape[1])):
                scale = f32(scales[token, block].item())
                part = part + sums[:, block].astype(f32) * scale
                low = low + f32(inputs[block]) * scale
            steps = quantized.scales[:, first // group_blocks].float().numpy()
            out[token] = out[token] + part * steps
            if quantized.mins is not None:
                out[token] = out[token] + low * quantized.mins[:, first // group_blocks].float().numpy()
    return out


@each_level
@each_integer_format
@pytest.mark.parametrize("num_tokens", [1, 7, 13])
def test_products_have_the_bits_of_the_scalar_order(
    level: str, format: zp.Format, num_tokens: int, normal: Normal
) -> None:
    quantized, x = zp.quantize(normal(21, 224), format), normal(num_tokens, 224, seed=1) * 10
    with native.use_level(level):
        found = zp.linear(x, zp.pack(quantized))
    assert np.array_equal(found.numpy(), emulated(x, quantized))


@each_level
@each_integer_format
def test_long_rows_and_many_tokens_have_the_bits_of_the_first_level(
    level: str, format: zp.Format, normal: Normal
) -> None:
    """Rows longer than a run of blocks, and tiles of any number of tokens, and two that meet one panel or two."""
    packed, x = zp.pack(zp.quantize(normal(37, 2208), format)), normal(29, 2208, seed=1) * 10
    with native.use_level(LEVELS[0]):
        wanted = zp.linear(x, packed)
    with native.use_level(level):
        found = [zp.linear(x[:count], packed) for count in (1, 3, 4, 8, 15, 16, 17, 18, 24, 29)]
    assert all(torch.equal(each, wanted[: len(each)]) for each in found)


def largest_codes(bits: int) -> zp.QuantizedTensor:
    """Weights and activations at the ends of their ranges, where 16-bit sums of products would saturate."""
    format = zp.Q4_0() if bits == 4 else zp.Q8_0()
    codes = torch.full((16, 32 * bits // 8), 0 if bits == 4 else -128, dtype=torch.uint8 if bits == 4 else torch.int8)
    codes[8:] = 255 if bits == 4 else 127
    return zp.QuantizedTensor(
        format=format, shape=(16, 32), dtype=torch.float32, codes=codes, scales=torch.ones(16, 1).half()
    )


@each_level
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("signs", [(1, 1, 1, 1), (-1, -1, -1, -1), (1, 1, -1, -1), (-1, 1, 1, -1)])
def test_the_largest_codes_do_not_saturate(level: str, bits: int, signs: tuple[int, ...]) -> None:
    quantized, x = largest_codes(bits), 127.0 * torch.tensor(signs).repeat(8).expand(24, 32)
    with native.use_level(level):
        found = zp.linear(x, zp.pack(quantized))
    assert torch.equal(found.double(), x.double() @ quantized.dequantize(torch.float64).T)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_number_of_threads_changes_no_bit(threads: int, normal: Normal) -> None:
    weights, x = hard(normal, 300, 256), normal(70, 256)
    before = torch.get_num_threads()
    one = zp.quantize(weights, "int4"), zp.inspect([weights.flatten()]).norm
    wanted = zp.linear_many(x, [zp.pack(one[0]), weights[:50]])
    try:
        torch.set_num_threads(threads)
        again = zp.quantize(weights, "int4")
        assert torch.equal(again.codes, one[0].codes)
        assert torch.equal(zp.inspect([weights.flatten()]).norm, one[1])
        assert all(map(torch.equal, zp.linear_many(x[:16], [zp.pack(again)]), [wanted[0][:16]]))
        assert torch.equal(zp.linear(x, zp.pack(again)), wanted[0])
    finally:
        torch.set_num_threads(before)


def test_a_token_has_the_same_bits_alone_and_in_any_batch(normal: Normal) -> None:
    packed, x = zp.pack(zp.quantize(normal(48, 256), "int4-minmax")), normal(77, 256)
    whole = zp.linear(x, packed)
    assert all(torch.equal(zp.linear(x[token], packed), whole[token]) for token in range(77))
    assert torch.equal(zp.linear(x[10:23], packed), whole[10:23])


@each_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [7, 64, 200])
def test_plain_weights_are_read_where_they_lie(level: str, dtype: torch.dtype, columns: int, normal: Normal) -> None:
    weight, bias, x = normal(19, columns).to(dtype), normal(19, seed=3), normal(7, columns, seed=1)
    base = kernels.dense_products(x, [weight], [bias])
    with native.use_level(level):
        found = kernels.dense_products(x, [weight], [bias])
    assert base is not None
    assert found is not None
    assert torch.equal(found[0], base[0])
    assert torch.allclose(found[0].double(), x.double() @ weight.double().T + bias, atol=1e-4)


@each_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 31, 32, 16383, 16384, 40_000])
def test_sums_of_squares_are_exact_to_float64(level: str, dtype: torch.dtype, numel: int, normal: Normal) -> None:
    grad = (normal(numel) * 1e3).to(dtype)
    with native.use_level(level):
        norm = zp.inspect([grad, grad[: numel // 2]]).norm
    wanted = grad.double().square().sum() + grad[: numel // 2].double().square().sum()
    assert norm.item() == pytest.approx(wanted.sqrt().item(), rel=1e-14)
    assert torch.equal(norm, zp.inspect([grad, grad[: numel // 2]]).norm)


@each_level
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_halves_of_every_kind_are_read(level: str, dtype: torch.dtype) -> None:
    """Every 16-bit pattern that is finite; for float32 their values."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = patterns.view(torch.float16) if dtype == torch.float16 else patterns.view(torch.bfloat16)
    values = values[values.isfinite() & (values.abs() < 1e4)].to(dtype)
    values = values[: values.numel() // 32 * 32].view(-1, 32)
    with native.use_level(level):
        found = kernels.encode_integers(values, zp.Int8())
    wanted = encode.encode(values, zp.Int8())
    assert found is not None
    assert torch.equal(found["scales"], wanted["scales"])
    assert torch.equal(found["codes"], wanted["codes"])
