"""Quantized layers inside a module, so that whatever calls the module runs with them.

`quantize_linears` replaces linear layers one at a time: beside the module, memory for one matrix is needed.  Other
parameters (embeddings, norms, stacked experts) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from zengine.inference.quantized import LayerError, quantize_weight
from zprecision.quant import Format, PackedTensor, QuantizedTensor, linear

__all__ = ["QuantizedLinear", "linear_weights", "put_quantized", "quantize_linears"]


_READERS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)  # use the weights of their children as tensors


@final
class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight, (out_features, in_features); products by zprecision."""

    def __init__(self, weight: QuantizedTensor | PackedTensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight  # no parameter: it is not trained
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features).  Returns (..., out_features) in the dtype of x."""
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return shape and bytes, for print(module)."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.weight.nbytes:,} bytes"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight = self.weight.to(fn(torch.empty(0, device=self.weight.device)).device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, part in self.weight.state_dict().items():
            destination[f"{prefix}weight.{name}"] = part

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        _metadata, _strict, missing, _unexpected, errors = others
        begin = f"{prefix}weight."
        parts = {name.removeprefix(begin): state.pop(name) for name in list(state) if name.startswith(begin)}
        super()._load_from_state_dict(state, prefix, *others)
        if not parts:
            missing.append(f"{prefix}weight")
            return
        try:
            weight = type(self.weight).from_state_dict(parts)
        except ValueError as error:
            errors.append(f"{prefix}weight: {error}")
            return
        if weight.shape != self.weight.shape:
            errors.append(f"{prefix}weight has the shape {weight.shape} in the state, {self.weight.shape} here")
        else:
            self.weight = weight.to(self.weight.device)


def linear_weights(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield (name, layer, weight as (out, in)) of each linear layer; Transformers' Conv1D has its transpose.

    Leaves out the layers of torch's own transformer blocks, which read their weights themselves.
    """
    fused = {id(child) for each in module.modules() if isinstance(each, _READERS) for child in each.children()}
    for name, layer in module.named_modules():
        if id(layer) in fused:
            continue
        weight = getattr(layer, "weight", None)
        if type(layer) is nn.Linear:
            yield name, layer, layer.weight
        elif isinstance(weight, Tensor) and weight.dim() == 2 and getattr(layer, "nf", None) == weight.shape[1]:
            yield name, layer, weight.t()


@torch.no_grad()
def quantize_linears(module: nn.Module, choose: Callable[[str], Format | None]) -> list[LayerError]:
    """Replace the linear layers of `module` in place; return a row for each.

    choose: from the name of a layer to its format; None keeps the layer.

    Raises ValueError if `module` itself is a linear layer, or has none to quantize.
    """
    rows = []
    for name, _layer, weight in list(linear_weights(module)):
        if not name:
            raise ValueError(f"{type(module).__name__} is one layer; pass the module that contains it")
        if (format := choose(name)) is None:
            continue
        packed, row = quantize_weight(name, weight, format)
        put_quantized(module, name, packed)
        rows.append(row)
    if not rows:
        raise ValueError(f"{type(module).__name__} has no linear layers to quantize")
    return rows


def put_quantized(module: nn.Module, name: str, weight: QuantizedTensor | PackedTensor) -> None:
    """Replace the layer `name` of `module` by a quantized one, which keeps its bias."""
    parent, _, last = name.rpartition(".")
    layer = module.get_submodule(name)
    setattr(module.get_submodule(parent), last, QuantizedLinear(weight, getattr(layer, "bias", None)))
