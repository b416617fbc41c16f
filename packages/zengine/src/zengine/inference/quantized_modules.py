"""Quantized layers inside a module, so that whatever calls the module runs with them.

`quantize_linears` replaces linear layers one at a time: beside the module, memory for one matrix is needed.  Other
parameters (embeddings, norms, stacked experts that experts/separate.py did not cut) stay as they are.

Layers that are split over tensor ranks stay split: each rank quantizes its own part, which has the codes and scales
of that part of the whole layer's, since rows are quantized one by one (zpartition/tensor/quantized.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, final

import attrs
import torch
from torch import Tensor, nn

from zengine.adapters.merging import computed_weight
from zengine.inference.quantized import LayerError, projections, quantize_weight, replaced
from zengine.inference.structure import Decoder, Projection
from zpartition import tensor
from zpartition.experts import own_experts_of
from zprecision.quant import Format, PackedTensor, QuantizedTensor, format_name, linear, unit_of

__all__ = [
    "QuantizedLinear",
    "StackedLayer",
    "layer_at",
    "linear_weights",
    "nothing_to_quantize",
    "parameters_of",
    "present_projection",
    "put_quantized",
    "quantize_linears",
    "quantized_layer",
    "scales_of",
    "unquantized",
    "with_weights_of",
]


_READERS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)  # use the weights of their children as tensors


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight, (out_features, in_features); products by zprecision."""

    linear_kind: ClassVar[tensor.LinearKind]  # its split classes; tensor parallelism cuts the weight

    def __init__(self, weight: QuantizedTensor | PackedTensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight  # no parameter: it is not trained
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features).  Returns (..., out_features) in the dtype of x."""
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the rows that this rank holds."""
        return linear(x, self.weight, bias)

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


@final
class QuantizedColumn(tensor.ColumnForward, QuantizedLinear):
    """A column-parallel QuantizedLinear; `out_features` is this rank's number."""


@final
class QuantizedRow(tensor.RowForward, QuantizedLinear):
    """A row-parallel QuantizedLinear: of a model that was split so before."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the columns that this rank holds, into memory that the sum over ranks may overwrite."""
        y = super().product(x, bias)
        return y.clone() if y.requires_grad else y


@final
class QuantizedGathered(tensor.GatheredForward, QuantizedLinear):
    """A QuantizedLinear split by outputs behind split activations."""


QuantizedLinear.linear_kind = tensor.LinearKind(
    QuantizedColumn, QuantizedRow, QuantizedGathered, 0, ("out_features", "in_features")
)
_SPLIT: tuple[tuple[type, type[QuantizedLinear]], ...] = (
    (tensor.ColumnForward, QuantizedColumn),
    (tensor.RowForward, QuantizedRow),
    (tensor.GatheredForward, QuantizedGathered),
)


def quantized_layer(layer: nn.Module, weight: PackedTensor | QuantizedTensor) -> QuantizedLinear:
    """Return a quantized layer in the place of `layer`, whole or split as it is, with its bias.

    weight: of the part that this rank holds, (out_features, in_features).
    """
    made = QuantizedLinear(weight, getattr(layer, "bias", None))
    if isinstance(layer, tensor.SplitLayer):
        made.__class__ = next(kind for base, kind in _SPLIT if isinstance(layer, base))
        own = {name: at for name, at in layer.placement.addresses.items() if name != "weight"}
        made.placement = attrs.evolve(layer.placement, addresses=own)  # type: ignore[assignment]
    return made.train(layer.training)


def linear_weights(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield (name, layer, weight as (out, in)) of each linear layer; Transformers' Conv1D has its transpose.

    Leaves out the layers of torch's own transformer blocks, which read their weights themselves, and experts of other
    ranks, which are empty here.
    """
    fused = {id(child) for each in module.modules() if isinstance(each, _READERS) for child in each.children()}
    for name, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if id(layer) in fused or (isinstance(weight, Tensor) and not weight.numel()):
            continue
        if type(layer) is nn.Linear or (isinstance(layer, nn.Linear) and isinstance(layer, tensor.SplitLayer)):
            yield name, layer, layer.weight
        elif isinstance(weight, Tensor) and weight.dim() == 2 and getattr(layer, "nf", None) == weight.shape[1]:
            yield name, layer, weight.t()


@torch.no_grad()
def quantize_linears(module: nn.Module, choose: Callable[[str], Format | None]) -> list[LayerError]:
    """Replace the linear layers of `module` in place; return a row for each.

    choose: from the name of a layer to its format; None keeps the layer.

    Raises ValueError, before anything changes, if `module` is a linear layer itself, has none to quantize, or is
    split by inputs inside a group.
    """
    found = [
        (name, layer, weight, format)
        for name, layer, weight in linear_weights(module)
        if (format := choose(name)) is not None or not name
    ]
    for name, layer, _, format in found:
        if not name:
            raise ValueError(f"{type(module).__name__} is one layer; pass the module that contains it")
        assert format is not None
        _check_split(name, layer, format)
    if not found:
        raise ValueError(nothing_to_quantize(module))
    rows = []
    while found:  # drops each matrix before the next
        name, _, weight, format = found.pop(0)
        assert format is not None
        rows.append(_replace(module, name, weight, format))
    return rows


def nothing_to_quantize(module: nn.Module) -> str:
    """Return the reason why no layer of a module is quantized."""
    kind, names = type(module).__name__, [name for name, *_ in linear_weights(module)]
    if names:
        return f"none of the {len(names)} linear layers of {kind} is to be quantized: {', '.join(names[:5])}, ..."
    if any(isinstance(each, QuantizedLinear) for each in module.modules()):
        advice = "leave out dtype='int8' and quant, or pass the plain model"
        return f"the linear layers of {kind} are quantized already: {advice}"
    return f"{kind} has no linear layers to quantize"


def _replace(module: nn.Module, name: str, weight: Tensor, format: Format) -> LayerError:
    packed, row = quantize_weight(name, weight, format)
    put_quantized(module, name, packed)
    return row


def put_quantized(module: nn.Module, name: str, weight: QuantizedTensor | PackedTensor) -> None:
    """Replace the layer `name` of `module` by a quantized one, which keeps its bias and its place among ranks."""
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, quantized_layer(module.get_submodule(name), weight))


def _check_split(name: str, layer: nn.Module, format: Format) -> None:
    """Raise ValueError if ranks hold parts of one group of a row-parallel layer."""
    if not isinstance(layer, tensor.RowForward):
        return
    unit, ends = unit_of(format), [*itertools.accumulate(layer.placement.sizes)][:-1]
    has_row_scales = getattr(format, "group", unit) is None
    if has_row_scales or any(end % unit for end in ends):
        what = "one scale a row" if has_row_scales else f"groups of {unit} inputs"
        raise ValueError(
            f"{name} is split already, by inputs at {', '.join(map(str, ends))}, and {format_name(format)} has "
            f"{what}: pass the whole model to init_inference(), which splits such layers by outputs."
        )


def with_weights_of(decoder: Decoder, module: nn.Module) -> Decoder:
    """Return a decoder with the present weights of the module that it was recognized in: quantized ones, too.

    Returns `decoder` itself if it has them.
    """
    is_current = all(
        _present_weight(each, layer_at(module, each.name)) is each.weight for each in projections(decoder)
    )
    return decoder if is_current else replaced(decoder, lambda each: present_projection(each, module))


def present_projection(projection: Projection, module: nn.Module) -> Projection:
    """Return a projection with the present weight of its layer; the same one if it has it."""
    layer = layer_at(module, projection.name)
    weight = _present_weight(projection, layer)
    if weight is projection.weight:
        return projection
    return attrs.evolve(projection, weight=weight, bias=getattr(layer, "bias", None))


def parameters_of(projection: Projection, module: nn.Module) -> tuple[nn.Parameter, ...]:
    """Return the parameters of a projection's layer, its adapters' included."""
    path, _, number = projection.name.rpartition(".")
    parent, _, last = path.rpartition(".")
    stack = getattr(module.get_submodule(parent), last, None) if number.isdecimal() else None
    if isinstance(stack, nn.Parameter):  # of experts
        return (stack,)
    return tuple(module.get_submodule(projection.name).parameters())


@attrs.frozen(eq=False)
class StackedLayer:
    """One matrix of stacked experts."""

    weight: Tensor


def layer_at(module: nn.Module, name: str) -> nn.Module | StackedLayer:
    """Return the layer `name`; that of stacked experts has the name of their parameter, and its number.

    The number is that among the experts of all ranks.
    """
    path, _, number = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    experts = module.get_submodule(parent)
    stack = getattr(experts, last, None) if number.isdecimal() else None
    if not isinstance(stack, Tensor):
        return module.get_submodule(name)
    return StackedLayer(stack[int(number) - own_experts_of(experts).start])


def _present_weight(
    projection: Projection, layer: nn.Module | StackedLayer
) -> Tensor | QuantizedTensor | PackedTensor:
    """Return the weight of a layer, (out, in): a new view if the layer's memory is another one.

    Of a layer with adapters, base and update are merged anew.
    """
    held = projection.weight
    if isinstance(layer, nn.Module) and (dense := computed_weight(layer, held.dtype)) is not None:
        return dense
    if isinstance(layer, QuantizedLinear):
        return layer.weight
    own = layer.weight
    assert isinstance(own, Tensor)
    if isinstance(layer, tensor.SplitLayer):
        kernel = getattr(layer, "kernel", None)
        own = kernel() if callable(kernel) else own
        same = isinstance(held, Tensor) and held.data_ptr() == own.data_ptr() and held.dtype == own.dtype
        return held if same else own
    if not isinstance(held, Tensor):
        return own if tuple(own.shape) == tuple(held.shape) else own.t()
    if held.data_ptr() == own.data_ptr() and held.dtype == own.dtype:
        return held
    # Transformers' Conv1D has (in, out); a matrix of stacked experts is a view anyway, and its strides tell.
    is_transposed = held.stride(-1) != 1 if isinstance(layer, StackedLayer) else held._is_view()
    return own.t() if is_transposed else own


def scales_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the scales of all quantized layers by their names, (out_features, groups) each."""
    found = {}
    for name, layer in module.named_modules():
        if isinstance(layer, QuantizedLinear):
            weight = layer.weight
            found[name] = (weight.unpack() if isinstance(weight, PackedTensor) else weight).scales
    return found


def unquantized(module: nn.Module) -> list[str]:
    """Return the names of the matrices that are no quantized layers: embeddings, stacked experts, layers left out."""
    return [name for name, param in module.named_parameters() if param.dim() > 1]
