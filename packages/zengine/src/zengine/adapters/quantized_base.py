"""Frozen layers in 4 or 8 bits, for adapters (QLoRA: Dettmers et al. 2023, arXiv 2305.14314).

    quantize_base(model, "nf4", ["q_proj", "v_proj"])
    add_lora(model, LoRAConfig(target_mods=["q_proj", "v_proj"]))

A layer holds its codes and scales as frozen parameters of bytes.  So ZeRO shards and gathers them as it does other
frozen weights, without decoding (no block of codes is cut: zpartition/layout/layout.py), checkpoints save them once,
any world loads them, and no cast of the module reaches them.  Names of the parameters end with the format: codes of
another format are another tensor, and a load says which one is missing.

Forward and backward dequantize the weight into the dtype of x, for one product each, and keep the codes alone: the
gradient of x is dy @ W, and W has none.  So the numbers are those of a plain layer with the dequantized weight, bit
for bit.

Rejected: products of integers (zprecision.linear), which round the activation; a parameter of floating codes, which
module.bfloat16() would cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from zengine.adapters.lora import LoRALinear, replace_layer, select_layers
from zpartition import is_deferred
from zprecision.quant import Format, QuantizedTensor, format_name, format_named, quantize

__all__ = ["QuantizedBase", "QuantizedLoRALinear", "quantize_base"]


_DECODED_NUMEL = 2**22  # elements that are dequantized at a time
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x (..., in), matrix (in, out), bias (out,)


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, matrix.t(), bias)


class CodeParameter(Parameter):
    """Bytes of a quantized weight."""

    def requires_grad_(self, requires_grad: bool = True) -> CodeParameter:
        """Raises ValueError for True."""
        if requires_grad:
            raise ValueError(
                "a quantized weight cannot be trained: its codes have no gradient. Add an adapter (add_lora) and "
                "train that, or build the model without quantize_base() to train the weight itself."
            )
        return self


class QuantizedBase(nn.Module):
    """A linear layer with a frozen, quantized weight."""

    def __init__(self, weight: QuantizedTensor, bias: Parameter | None) -> None:
        """Hold the parts of `weight`, (out, in), as parameters of bytes."""
        super().__init__()
        self.format, self.dtype = weight.format, weight.dtype  # dtype: of the weight before
        self.out_features, self.in_features = weight.shape
        text = format_name(weight.format).replace("-", "_")
        self._names = {part: f"weight_{part}_{text}" for part in weight.parts()}
        self._dtypes = {part: tensor.dtype for part, tensor in weight.parts().items()}
        for part, tensor in weight.parts().items():
            self.register_parameter(self._names[part], CodeParameter(_bytes_of(tensor), requires_grad=False))
        self.bias: Tensor | None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features).  Returns (..., out_features) in the dtype of x."""
        return self.base(x)

    def base(self, x: Tensor, multiply: Product = _product) -> Tensor:
        """Compute the layer without an adapter.

        multiply: computes the product of the forward, and that of the gradient of x.
        """
        y: Tensor = _DequantizedProduct.apply(x, self.bias, self._decode, multiply, *self._parts())  # type: ignore[no-untyped-call]
        return y

    def base_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dequantized weight, (out, in), in the dtype of what it multiplies; by default as it had."""
        return self._decode(dtype or self.dtype, *self._parts())

    def with_lora(self, rank: int, alpha: float, *, dropout: float = 0.0) -> QuantizedLoRALinear:
        """Return a layer with the same parameters and an adapter in the dtype of the weight before."""
        return QuantizedLoRALinear(self, rank, alpha, dropout=dropout)

    def extra_repr(self) -> str:
        """Return sizes, format and bytes, for print(module)."""
        size = sum(each.numel() for each in self._parts())
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {format_name(self.format)}, "
            f"{size:,} bytes"
        )

    def _parts(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names.values()]

    def _decode(self, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        """Return the weight of the parts' bytes; a large one by rows, since decoding takes a few times its memory."""
        tensors = {name: part.detach().view(kind) for (name, kind), part in zip(self._dtypes.items(), parts)}
        shape = (self.out_features, self.in_features)
        weight = QuantizedTensor(format=self.format, shape=shape, dtype=self.dtype, **tensors)
        rows = max(1, _DECODED_NUMEL // self.in_features)
        if rows >= self.out_features:
            return weight.dequantize(dtype)
        dense = parts[0].new_empty(shape, dtype=dtype)
        for start in range(0, self.out_features, rows):
            part = weight.narrow(0, start, min(rows, self.out_features - start))
            dense[start : start + rows].copy_(part.dequantize(dtype))
        return dense


@final
class QuantizedLoRALinear(LoRALinear, QuantizedBase):
    """A quantized layer with a trained update of low rank."""

    def __init__(self, layer: QuantizedBase, rank: int, alpha: float, *, dropout: float = 0.0) -> None:
        """Adopt the parameters of `layer`, and draw an update of zero."""
        nn.Module.__init__(self)
        self.__dict__.update({name: value for name, value in vars(layer).items() if not isinstance(value, dict)})
        self._names, self._dtypes = layer._names, layer._dtypes
        for name, param in layer._parameters.items():
            self.register_parameter(name, param)
        codes = layer._parts()[0]
        self._add_update(rank, alpha, dropout, torch.empty(0, dtype=layer.dtype, device=codes.device))
        self.train(layer.training)

    base = QuantizedBase.base

    def base_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dequantized weight, (out, in), by default in the dtype of the adapter."""
        return QuantizedBase.base_weight(self, dtype or self.lora_A.dtype)

    def plain_layer(self, weight: Tensor) -> nn.Module:
        """Return an nn.Linear with the weight, (out, in), and the same bias."""
        made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        made.weight = Parameter(weight)
        made.register_parameter("bias", self.bias)  # type: ignore[arg-type]
        return made.train(self.training)

    def extra_repr(self) -> str:
        """Return what both bases say."""
        return f"{QuantizedBase.extra_repr(self)}, rank={self.rank}, scale={self.scale}"


class _DequantizedProduct(torch.autograd.Function):
    """x @ W.T + bias, where W exists during a product only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        decode: Callable[..., Tensor],
        multiply: Product,
        *parts: Tensor,
    ) -> Tensor:
        ctx.decode, ctx.multiply = decode, multiply
        ctx.save_for_backward(*parts)
        return multiply(x, decode(x.dtype, *parts).t(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        parts = ctx.saved_tensors
        dx = ctx.multiply(dy, ctx.decode(dy.dtype, *parts), None) if ctx.needs_input_grad[0] else None
        summed = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return (dx, summed, None, None, *(None for _ in parts))


@torch.no_grad()
def quantize_base(module: nn.Module, format: Format | str, targets: Sequence[str]) -> list[str]:
    """Replace linear layers of `module` by frozen, quantized ones; return their names.

    One layer at a time, so memory for one is needed beside the module.  On the meta device codes have no values, as
    for `zengine plan`.

    format: "nf4" and "int4" (4 bits), "int8" (8 bits) and others of zprecision, or a value.
    targets: ends of the layers' paths, as `LoRAConfig.target_mods`.

    Raises ValueError, before anything changes, for an unknown format, for targets that name no linear layer, and for
    a module whose weights `zero.Init` has deferred.
    """
    form = format_named(format) if isinstance(format, str) else format
    layers = select_layers(module, targets)
    if is_deferred(module):
        raise ValueError(
            "the module was built inside zero.Init and has no weights to quantize yet: build and load it outside of "
            "zero.Init (on one rank at a time, if memory is short), quantize it, and let ZeRO-3 shard the codes"
        )
    for name, layer in layers:
        if isinstance(layer, QuantizedBase):
            raise ValueError(f"{name} is quantized already: quantize_base() takes plain layers")
    while layers:
        name, layer = layers.pop(0)
        weight = layer.get_parameter("weight").detach()
        weight = weight if isinstance(layer, nn.Linear) else weight.t()  # Conv1D has (in, out)
        made = QuantizedBase(_quantized(weight, form), getattr(layer, "bias", None))
        replace_layer(module, name, made.train(layer.training))
    return [name for name, layer in module.named_modules() if isinstance(layer, QuantizedBase)]


def _quantized(weight: Tensor, format: Format) -> QuantizedTensor:
    """Quantize a weight; on the meta device, to codes of the same sizes without values."""
    if not weight.is_meta:
        return quantize(weight.contiguous(), format)
    row = quantize(torch.zeros(1, weight.shape[1], dtype=weight.dtype, device="cpu"), format)
    parts = {
        name: part.new_empty((weight.shape[0], part.shape[1]), device="meta") for name, part in row.parts().items()
    }
    return QuantizedTensor(format=format, shape=tuple(weight.shape), dtype=weight.dtype, **parts)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
