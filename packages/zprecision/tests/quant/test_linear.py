"""Products with quantized weights, against products with their dequantized values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zprecision as zp

Normal = Callable[..., Tensor]


def test_a_product_is_that_of_the_values_up_to_the_rounding_of_the_activation(
    format: zp.Format, normal: Normal
) -> None:
    weight, bias, x = normal(40, 320), normal(40, seed=1), normal(2, 3, 320, seed=2)
    quantized = zp.quantize(weight, format)
    exact = torch.nn.functional.linear(x.double(), quantized.dequantize(torch.float64), bias.double())
    codes, scales = zp.quantize_activations(x)
    bound = (scales / 2) @ quantized.dequantize().abs().view(40, 10, 32).sum(-1).T + 1e-4
    for form in (quantized, zp.pack(quantized)):
        product = zp.linear(x, form, bias)
        assert product.shape == (2, 3, 40)
        assert ((product - exact).abs() <= bound).all()
    assert codes.shape == (2, 3, 10, 32)


def test_sixteen_bits_of_the_activation_leave_the_rounding_of_the_weight(normal: Normal) -> None:
    weight, x = normal(40, 320), normal(7, 320, seed=2)
    errors = []
    for name in ("int8", "int8-a16"):
        quantized = zp.quantize(weight, name)
        exact = x.double() @ quantized.dequantize(torch.float64).T
        errors.append((zp.linear(x, quantized) - exact).norm() / exact.norm())
    assert errors[1] < errors[0] / 100
    assert errors[1] < 1e-4


def test_one_call_multiplies_by_formats_of_both_activations(normal: Normal) -> None:
    x = normal(20, 128)
    weights = [
        zp.pack(zp.quantize(normal(48, 128, seed=k), name)) for k, name in enumerate(("int8-a16", "int8", "int4"))
    ]
    assert all(map(torch.equal, zp.linear_many(x, weights), (zp.linear(x, weight) for weight in weights)))


def test_a_plain_weight_is_read_where_it_lies(normal: Normal) -> None:
    weight, x = normal(24, 100), normal(3, 100, seed=1)
    assert torch.allclose(zp.linear(x, weight), x @ weight.T, atol=1e-4)
    assert torch.allclose(zp.linear(x, weight.bfloat16()), x @ weight.bfloat16().float().T, atol=1e-4)


def test_many_products_are_single_ones_bit_for_bit(normal: Normal) -> None:
    x, bias = normal(3, 128), normal(48, seed=3)
    weights = [zp.quantize(normal(48, 128, seed=9), name) for name in ("int4", "int8", "nf4")]
    together = zp.linear_many(x, weights, [None, bias, None])
    alone = [zp.linear(x, weights[0]), zp.linear(x, weights[1], bias), zp.linear(x, weights[2])]
    assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_has_the_dtype_of_the_activation(dtype: torch.dtype, normal: Normal) -> None:
    weight, x = zp.quantize(normal(16, 64), "int8"), normal(2, 64, seed=1).to(dtype)
    assert torch.equal(zp.linear(x, weight), zp.linear(x.float(), weight).to(dtype))


def test_a_block_that_is_not_finite_makes_its_outputs_nan_and_no_others(normal: Normal) -> None:
    x = normal(2, 64)
    x[0, 40] = torch.inf
    product = zp.linear(x, zp.quantize(normal(8, 64), "int4"))
    assert product[0].isnan().all()
    assert product[1].isfinite().all()


def test_gradients_pass_through_the_activation_and_the_bias(normal: Normal) -> None:
    weight, bias = zp.quantize(normal(16, 64), "nf4"), normal(16).requires_grad_()
    x = normal(3, 64, seed=1).requires_grad_()
    zp.linear(x, weight, bias).square().sum().backward()
    again, biased = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
    torch.nn.functional.linear(again, weight.dequantize(), biased).square().sum().backward()
    assert x.grad is not None
    assert bias.grad is not None
    assert torch.allclose(x.grad, again.grad, atol=1e-3)
    assert torch.allclose(bias.grad, biased.grad, atol=1e-3)


def test_no_tokens_and_no_rows_give_empty_products(normal: Normal) -> None:
    weight = zp.quantize(normal(16, 64), "int4")
    assert zp.linear(torch.ones(0, 64), weight).shape == (0, 16)
    assert zp.linear(torch.ones(2, 64), weight.narrow(0, 0, 0)).shape == (2, 0)


def test_shapes_that_do_not_fit_are_rejected(normal: Normal) -> None:
    weight = zp.quantize(normal(16, 64), "int4")
    with pytest.raises(ValueError, match=r"x is \(2, 32\) and the weight \(16, 64\)"):
        zp.linear(torch.ones(2, 32), weight)
    with pytest.raises(ValueError, match=r"bias is \(15,\) and must be \(16,\)"):
        zp.linear(torch.ones(2, 64), weight, torch.ones(15))
    with pytest.raises(TypeError, match=r"x is torch\.int64"):
        zp.linear(torch.ones(2, 64, dtype=torch.int64), weight)


def test_tensors_without_memory_are_not_read_by_the_kernels(normal: Normal) -> None:
    class Own(Tensor):
        """A tensor of a subclass, which may have no address."""

    weight, x = normal(32, 64), normal(3, 64, seed=1)
    packed = zp.pack(zp.quantize(weight, "int8"))
    own = x.as_subclass(Own)
    assert torch.allclose(zp.linear(own, packed).as_subclass(Tensor), zp.linear(x, packed), atol=1e-5)
    assert torch.allclose(zp.linear(x, weight.as_subclass(Own)).as_subclass(Tensor), zp.linear(x, weight), atol=1e-4)
    assert torch.equal(
        zp.quantize(weight.as_subclass(Own), "int4").codes.as_subclass(Tensor), zp.quantize(weight, "int4").codes
    )


def test_weights_and_biases_on_another_device_are_rejected(normal: Normal) -> None:
    packed = zp.pack(zp.quantize(normal(32, 64), "int8"))
    with pytest.raises(ValueError, match="x is on cpu, weight and bias are on meta"):
        zp.linear(torch.ones(1, 64), packed.to("meta"))
    with pytest.raises(ValueError, match="x is on cpu, weight and bias are on cpu, meta"):
        zp.linear(torch.ones(1, 64), packed, torch.ones(32, device="meta"))


def test_biases_and_plain_weights_are_trained_although_x_is_not(normal: Normal) -> None:
    x, bias = normal(3, 64), torch.zeros(32, requires_grad=True)
    zp.linear(x, zp.quantize(normal(32, 64), "int8"), bias).sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((32,), 3.0))
    weight = normal(32, 64).requires_grad_()
    zp.linear(x, weight).sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, x.sum(0).expand(32, 64), atol=1e-5)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_and_device_change_nothing(default: torch.dtype, normal: Normal) -> None:
    """Kernels write float32 into memory of the CPU, whatever torch.empty would allocate."""
    x, weight = normal(3, 96), normal(40, 96, seed=1)

    def results() -> list[Tensor]:
        int4 = zp.quantize(weight, "int4")
        nf4 = zp.quantize(weight, "nf4")
        return [int4.codes, zp.linear(x, zp.pack(int4)), zp.linear(x, weight), nf4.dequantize()]

    wanted = results()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            found = results()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(found, wanted))


@pytest.mark.parametrize(
    ("needs_grad", "format", "is_packed"),
    [
        (False, zp.Int8(), False),
        (True, zp.Int4(scale="minmax"), True),
        (True, zp.Q4_K(), False),
        (False, zp.NF4(), True),
    ],
)
def test_a_compiled_caller_is_one_graph_with_the_same_bits(
    needs_grad: bool, format: zp.Format, is_packed: bool
) -> None:
    rows = zp.quantize(torch.randn(24, 64), format)
    weight, plain = zp.pack(rows) if is_packed else rows, torch.randn(5, 64)
    bias = torch.randn(24, requires_grad=needs_grad)

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = zp.linear_many(2 * x, [weight, plain], [bias, None])
        return torch.relu(one) + 1, other

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for rows_of_x in (3, 4):
        x = torch.randn(rows_of_x, 2, 64, requires_grad=needs_grad)
        (found, other), (wanted, plainly) = compiled(x), call(x)
        assert torch.equal(found, wanted)
        assert torch.allclose(other, plainly, rtol=1e-5, atol=1e-5)
        if needs_grad:
            pairs = zip(*(torch.autograd.grad(each.square().sum(), (x, bias)) for each in (found, wanted)))
            assert all(torch.equal(one, same) for one, same in pairs)


def test_the_operators_hold_what_torch_asks_of_one() -> None:
    weight, x = zp.pack(zp.quantize(torch.randn(24, 64), zp.Int4())), torch.randn(3, 64, requires_grad=True)
    text = "PackedTensor int4 float32 panels"
    for bias in (None, torch.randn(24)):
        given = (x, [weight.data], bias, text, [24, 64])
        torch.library.opcheck(torch.ops.zprecision.quantized_linear.default, given)
    assert torch.equal(torch.ops.zprecision.quantized_linear(*given), zp.linear(x, weight, bias))
