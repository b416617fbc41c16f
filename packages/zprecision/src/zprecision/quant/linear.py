"""Products with quantized weights.

`linear` is torch.nn.functional.linear for weights of any kind: quantized, packed, or plain.  On CPUs with the
kernels, a product with an integer format quantizes the activation (8 bits in blocks of 32, or two parts of 8 bits if
the format says so) and multiplies integers; elsewhere torch multiplies the same rounded activation by the dequantized
weight, which differs only by the rounding of float32 sums.  CUDA devices with kernels do as CPUs for up to 32 tokens;
for more, and in the place of 16 bits, the activation is not rounded (gpu.py).  Formats without integers (NF4, Fp8,
Q4_K, Q6_K) are dequantized, and the activation is not rounded.

`linear_many` multiplies one activation by several weights: it is quantized once, and all rows form one list of work.

A token's output depends on its activation and the weight only, bit for bit: not on other tokens, threads or the
instruction set, if the kernels are used.

Backward passes through x, with the dequantized weight; weights are constants.

Under torch.compile a product with quantized weights is the operator `zprecision::quantized_linear`, so the graph has
no break.  It has the tensors of the weight as inputs, and the rest as a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zprecision.backends.gpu.launch import has_gpu_kernels
from zprecision.backends.native import is_addressable, library
from zprecision.quant import gpu
from zprecision.quant.activations import round_activations
from zprecision.quant.formats import format_name, format_named
from zprecision.quant.kernels import dense_products, products
from zprecision.quant.panels import PackedTensor, packed_once, product_format
from zprecision.quant.tensor import QuantizedTensor, assemble

__all__ = ["Weight", "linear", "linear_many"]

Weight: TypeAlias = QuantizedTensor | PackedTensor | Tensor
_PANEL_NUMEL = 2**22  # weights that are dequantized at a time


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, in the dtype of x.

    x: (..., in_features) of a floating dtype, on the device of the weight. weight: (out_features, in_features). bias:
    (out_features,) or None. On a CPU a `QuantizedTensor` keeps a packed copy of itself from its first product on;
    pass `pack(weight)` to have one copy. Raises ValueError for shapes and devices that do not fit.

    >>> import torch, zprecision
    >>> weight = zprecision.pack(zprecision.quantize(torch.ones(4, 32), "int4"))
    >>> zprecision.linear(torch.ones(1, 32), weight).round()
    tensor([[32., 32., 32., 32.]])
    """
    return linear_many(x, [weight], [bias])[0]


def linear_many(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None] | None = None) -> list[Tensor]:
    """Return `linear(x, weight, bias)` for every weight: the same bits, in one pass over a list of matrices."""
    if torch.compiler.is_compiling():
        biases = [None] * len(weights) if biases is None else biases
        return [_traced(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return _linear_many(x, weights, biases)


def _linear_many(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None] | None) -> list[Tensor]:
    biases = [None] * len(weights) if biases is None else biases
    for weight, bias in zip(weights, biases, strict=True):
        _check(x, weight, bias)
    given = [x, *(each for each in (*weights, *biases) if isinstance(each, Tensor))]
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        return [_apply(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return _products(x, weights, biases)


def _apply(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor) and weight.requires_grad:
        return _by_torch(x, weight, bias)
    product: Tensor = _QuantizedProduct.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return product


def _check(x: Tensor, weight: Weight, bias: Tensor | None) -> None:
    shape = tuple(weight.shape)
    if len(shape) != 2 or not x.dim() or x.shape[-1] != shape[-1]:
        raise ValueError(
            f"linear: x is {tuple(x.shape)} and the weight {shape}; it must be (out_features, in_features)"
        )
    if bias is not None and tuple(bias.shape) != shape[:1]:
        raise ValueError(f"linear: bias is {tuple(bias.shape)} and must be {shape[:1]}")
    others = [weight.device, *(() if bias is None else (bias.device,))]
    if any(device != x.device for device in others):
        raise ValueError(
            f"linear: x is on {x.device}, weight and bias are on {', '.join(map(str, others))}: move them"
        )
    if not x.is_floating_point():
        raise TypeError(f"linear: x is {x.dtype}; pass a floating dtype")


def _products(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> list[Tensor]:
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    found = _packed_by_kernels(flat, weights, biases) | _plain_by_kernels(flat, weights, biases)
    found |= _by_gpu_kernels(flat, weights, biases)
    return [
        _shaped_as(found[index], x) if index in found else _by_torch(x, weight, bias)
        for index, (weight, bias) in enumerate(zip(weights, biases, strict=True))
    ]


def _shaped_as(product: Tensor, x: Tensor) -> Tensor:
    if product.dtype != x.dtype:
        product = product.to(x.dtype)
    return product if x.dim() == 2 else product.view(*x.shape[:-1], product.shape[-1])


def _packed_by_kernels(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """Return the products with integer formats by index, in one call; none without kernels."""
    if library() is None or not is_addressable(x):
        return {}
    quantized = {index: weight for index, weight in enumerate(weights) if not isinstance(weight, Tensor)}
    held = {k: weight if isinstance(weight, PackedTensor) else packed_once(weight) for k, weight in quantized.items()}
    packed = {index: weight for index, weight in held.items() if isinstance(weight, PackedTensor)}
    matrices = [(weight.data, weight.shape[0], product_format(weight.format)) for weight in packed.values()]
    outs = products(x, matrices, [biases[index] for index in packed]) if packed else None
    return dict(zip(packed, outs, strict=True)) if outs is not None else {}


def _plain_by_kernels(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """Return the products with plain weights by index, read where they lie, for few tokens; none without kernels."""
    plain = {index: weight for index, weight in enumerate(weights) if isinstance(weight, Tensor)}
    if not plain or x.dtype == torch.float64 or not is_addressable(x):
        return {}
    outs = dense_products(x, list(plain.values()), [biases[index] for index in plain])
    return dict(zip(plain, outs, strict=True)) if outs is not None else {}


def _by_gpu_kernels(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """Return the products with integer formats by index, few tokens in one launch; none without kernels."""
    if not has_gpu_kernels(x.device):
        return {}
    matrices: dict[int, gpu.DeviceMatrix] = {}
    for index, weight in enumerate(weights):
        if isinstance(weight, Tensor) or product_format(weight.format) is None:
            continue
        rows = weight.unpack() if isinstance(weight, PackedTensor) else weight
        matrix = gpu.DeviceMatrix.of(rows.format, rows.shape, rows.parts())
        if matrix is not None:
            matrices[index] = matrix
    if not matrices:
        return {}
    if len(x) > gpu.MOST_TOKENS or any(matrix.form.activation_bits > 8 for matrix in matrices.values()):
        outs = {index: gpu.panel_product(x, matrix, biases[index]) for index, matrix in matrices.items()}
        return {index: out for index, out in outs.items() if out is not None}
    found = gpu.products(x, list(matrices.values()), [biases[index] for index in matrices])
    return {} if found is None else dict(zip(matrices, found, strict=True))


def _by_torch(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):
        return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    if isinstance(weight, PackedTensor):
        weight = weight.unpack()
    form = product_format(weight.format)
    inputs = x.float() if form is None else round_activations(x, form.activation_bits)
    rows = max(1, _PANEL_NUMEL // max(1, weight.shape[1]))
    parts = [
        torch.nn.functional.linear(
            inputs, weight.narrow(0, first, min(rows, weight.shape[0] - first)).dequantize(torch.float32)
        )
        for first in range(0, weight.shape[0], rows)
    ]
    product = torch.cat(parts, dim=-1) if parts else inputs.new_zeros(*x.shape[:-1], 0)
    return (product if bias is None else product + bias).to(x.dtype)


class _QuantizedProduct(torch.autograd.Function):
    """A product that is differentiable in x and in the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return _products(x, [weight], [bias])[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weight = ctx.weight if isinstance(ctx.weight, Tensor) else ctx.weight.dequantize(grad.dtype)
        for_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight.to(grad.dtype), None, for_bias


# -- torch.compile --------------------------------------------------------------------------------


def _traced(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Return the product as nodes of a graph."""
    _check(x, weight, bias)
    if isinstance(weight, Tensor):
        return _by_torch(x, weight, bias)
    kind = f"{type(weight).__name__} {format_name(weight.format)} {str(weight.dtype).removeprefix('torch.')}"
    parts = weight.parts()
    text = " ".join((kind, *parts))
    product: Tensor = _quantized_linear(x, list(parts.values()), bias, text, list(weight.shape))
    return product


def _assembled(parts: Sequence[Tensor], kind: str, shape: Sequence[int]) -> Weight:
    """Return the weight that `_traced` took apart."""
    made, format, dtype, *names = kind.split()
    held = dict(zip(names, parts, strict=True))
    if made == QuantizedTensor.__name__:
        return assemble(format_named(format), shape, getattr(torch, dtype), held)
    rows, columns = shape
    return PackedTensor(
        format=format_named(format), shape=(rows, columns), dtype=getattr(torch, dtype), data=held["panels"]
    )


@torch.library.custom_op("zprecision::quantized_linear", mutates_args=())
def _quantized_linear(
    x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, kind: str, shape: Sequence[int]
) -> Tensor:
    return _products(x, [_assembled(parts, kind, shape)], [bias])[0].contiguous()


@_quantized_linear.register_fake
def _(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, kind: str, shape: Sequence[int]) -> Tensor:
    return x.new_empty(*x.shape[:-1], shape[0])


@torch.library.custom_op("zprecision::dequantized_product", mutates_args=())
def _dequantized_product(grad: Tensor, parts: Sequence[Tensor], kind: str, shape: Sequence[int]) -> Tensor:
    weight = _assembled(parts, kind, shape)
    assert not isinstance(weight, Tensor)
    return grad @ weight.dequantize(grad.dtype)


@_dequantized_product.register_fake
def _(grad: Tensor, parts: Sequence[Tensor], kind: str, shape: Sequence[int]) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], shape[1])


def _keep_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _x, parts, _bias, *ctx.rest = inputs
    ctx.save_for_backward(*parts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    parts = list(ctx.saved_tensors)
    for_x = _dequantized_product(grad, parts, *ctx.rest) if ctx.needs_input_grad[0] else None
    for_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
    return for_x, [None] * len(parts), for_bias, None, None


_quantized_linear.register_autograd(_backward, setup_context=_keep_weight)
