"""Fake quantization: DeepSpeed's laws by golden values, formats bit for bit, gradients straight through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zprecision as zp
from zprecision.quant import round_to_bits, simulate, simulate_format
from zprecision.quant.simulate import QuantizerKind

Normal = Callable[..., Tensor]

GOLDEN_INPUT = [-1.0, -0.3, 0.04, 0.5, 0.99]


@pytest.mark.parametrize(
    ("kind", "bits", "wanted"),
    [
        ("symmetric", 4, [-1, -0.25, 0, 0.5, 0.875]),
        ("symmetric", 8, [-1, -0.296875, 0.0390625, 0.5, 0.9921875]),
        ("asymmetric", 4, [-0.995, -0.24875, 0, 0.4975, 0.870625]),
        ("symmetric", 2, [-0.83, 0, 0, 0.83, 0.83]),
        ("symmetric", 1, [-0.566, -0.566, 0.566, 0.566, 0.566]),
    ],
)
def test_the_laws_give_deepspeeds_values(kind: QuantizerKind, bits: int, wanted: list[float]) -> None:
    found = round_to_bits(torch.tensor(GOLDEN_INPUT), bits, kind=kind)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_groups_are_rounded_by_themselves(kind: QuantizerKind, bits: int, normal: Normal) -> None:
    if bits <= 2 and kind == "asymmetric":
        return
    x = normal(6, 8)
    whole = round_to_bits(x, bits, groups=12, kind=kind)
    parts = [round_to_bits(part, bits, kind=kind) for part in x.reshape(12, -1)]
    assert torch.equal(whole, torch.stack(parts).reshape(x.shape))
    assert len(round_to_bits(x, bits, groups=1, kind=kind).unique()) <= 2**bits


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_zeros_stay_zeros(bits: int) -> None:
    assert not round_to_bits(torch.zeros(2, 4), bits, groups=2).any()


def test_a_constant_group_is_exact() -> None:
    x = torch.tensor([[0.3, 0.3], [0.0, 0.0], [-2.0, 1.0]])
    assert torch.equal(round_to_bits(x, 4, groups=3, kind="asymmetric")[:2], x[:2])


def test_given_limits_replace_those_of_the_tensor() -> None:
    x = torch.tensor([-4.0, 0.26, 4.0])
    limits = torch.tensor(-1.0), torch.tensor(1.0)
    assert round_to_bits(x, 4, limits=limits).tolist() == [-1.0, 0.25, 0.875]
    assert round_to_bits(x, 4, kind="asymmetric", limits=limits).tolist() == [-1.0, 0.25, 0.875]
    with pytest.raises(ValueError, match="limits are of one group and at least 3 bits; these are 3 groups"):
        round_to_bits(x, 4, groups=3, limits=limits)


def test_stochastic_rounding_is_right_on_average_and_repeats_with_a_generator() -> None:
    x = torch.full((20_000,), 0.3)
    x[0] = -1.0  # a step of 1/8
    draws = [
        round_to_bits(x, 4, rounding="stochastic", generator=torch.Generator().manual_seed(seed)) for seed in (1, 1)
    ]
    assert torch.equal(*draws)
    assert set(draws[0][1:].tolist()) == {0.25, 0.375}
    assert abs(draws[0][1:].mean().item() - 0.3) < 0.002  # 4.5 standard errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradients_pass_straight_through(dtype: torch.dtype, normal: Normal) -> None:
    x = normal(4, 8).to(dtype).requires_grad_()
    slope = normal(4, 8).to(dtype)
    for rounded in (simulate(x, 4), simulate(x, 2)):
        assert rounded.dtype == dtype
        assert rounded.shape == x.shape
        (grad,) = torch.autograd.grad(rounded, x, slope)
        assert torch.equal(grad, slope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int4", "int8", "int4-row", "int8-row-amax", "int4-g64-minmax", "q4_0", "nf4"])
def test_a_simulated_format_has_the_bits_of_the_stored_one(name: str, dtype: torch.dtype, normal: Normal) -> None:
    x = normal(6, 128).to(dtype).requires_grad_()
    assert torch.equal(simulate_format(x, name), zp.quantize(x, name).dequantize())


def test_halves_are_rounded_in_float32(normal: Normal) -> None:
    x = normal(4, 64).bfloat16()
    assert torch.equal(round_to_bits(x, 4, groups=4), round_to_bits(x.float(), 4, groups=4).bfloat16())


@pytest.mark.parametrize(
    ("bits", "options", "message"),
    [
        (0, {}, r"bits = 0: pass 1 \(binary\), 2 \(ternary\), or 3 to 16"),
        (17, {}, "bits = 17: pass 1"),
        (2, {"kind": "asymmetric"}, "bits = 2 is symmetric; pass kind='symmetric', or at least 3 bits"),
        (4, {"kind": "even"}, "'even': pass one of 'symmetric', 'asymmetric'"),
        (4, {"rounding": "up"}, "'up': pass one of 'nearest', 'stochastic'"),
        (4, {"groups": 5}, r"groups = 5 must divide the 12 elements of the tensor, \(3, 4\)"),
    ],
)
def test_wrong_arguments_are_named(bits: int, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        round_to_bits(torch.ones(3, 4), bits, **options)  # type: ignore[arg-type]


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"the tensor is torch\.int64; pass a floating dtype"):
        round_to_bits(torch.ones(3, dtype=torch.int64), 4)
