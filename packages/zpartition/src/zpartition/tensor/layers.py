"""Modules of a tensor-parallel model: split linear layers, and modules between them.

They are made from existing modules by changing the class: the module keeps its name, identity, hooks and parameters,
whose data become the part.  So ties stay ties, an optimizer that exists already holds the right parameters, and
`isinstance(layer, nn.Linear)` stays true.

- Split linear layers, in two storage orders: nn.Linear's weight is (out, in), that of the Conv1D of Transformers
  (GPT-2) is (in, out).
- Modules between split layers: replicated weights with summed gradients, and modules that split or join tokens.  Any
  module can be converted (a custom norm, say); the subclass extends `forward` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from zpartition.layout.address import Address
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.tensor import functions
from zpartition.tensor.parallel_region import ParallelRegion

__all__ = [
    "ColumnConv1D",
    "ColumnForward",
    "ColumnLinear",
    "GatheredConv1D",
    "GatheredForward",
    "GatheredLinear",
    "LayerPlacement",
    "RowConv1D",
    "RowForward",
    "RowLinear",
    "SplitLayer",
    "gather_output",
    "scatter_output",
    "sum_gradients",
]


@final
@attrs.frozen(eq=False)
class LayerPlacement:
    """The part of a layer that this rank holds."""

    parallel_region: ParallelRegion
    addresses: Mapping[str, Address]  # of its parameters, by their names in it
    sizes: tuple[int, ...]  # of all ranks' parts, along the split dim
    is_joined: bool = False  # the split side is whole outside of the layer: outputs gathered, or inputs narrowed
    output_sizes: tuple[int, ...] = ()  # of all ranks' parts of the outputs, if both sides are split


class SplitLayer:
    """Base of all split layers; makes them `ModelParallelModule`."""

    placement: LayerPlacement

    @property
    def mp_group(self) -> ModelParallelGroup:
        """The ranks that hold the other parts."""
        return self.placement.parallel_region.mp_group

    def addresses(self) -> Mapping[str, Address]:
        """Addresses of the parameters, by name."""
        return self.placement.addresses


class _Product(nn.Module):
    """Common part of both storage orders."""

    weight: Tensor
    bias: Any  # Tensor or None

    def kernel(self) -> Tensor:
        """(out, in)."""
        return self.weight

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in) -> (..., out), with the weights that this rank holds."""
        return linear(x, self.kernel(), bias)


class _Transposed(_Product):
    """A weight stored as (in, out)."""

    def kernel(self) -> Tensor:
        return self.weight.t()


class _AnyProduct(Protocol):
    """A layer with weights of any kind: those here, or quantized ones."""

    placement: LayerPlacement
    bias: Any  # Tensor or None

    @property
    def mp_group(self) -> ModelParallelGroup: ...
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor: ...


class ColumnForward(SplitLayer):
    """Column-parallel: whole inputs, this rank's outputs.  Comes before a class with `product` and `bias`."""

    def forward(self: _AnyProduct, x: Tensor) -> Tensor:
        """(..., in) -> (..., this rank's part of out), or (..., out) if outputs are gathered."""
        placement = self.placement
        y = self.product(placement.parallel_region.enter(x), self.bias)
        if placement.is_joined:
            return functions.join_features(y, self.mp_group, placement.sizes)
        placement.parallel_region.begin_sharded(x, _as_module(self))
        return y


class RowForward(SplitLayer):
    """Row-parallel: this rank's inputs, whole outputs."""

    def forward(self: _AnyProduct, x: Tensor) -> Tensor:
        """(..., this rank's part of in), or (..., in) if inputs are whole -> (..., out)."""
        placement = self.placement
        placement.parallel_region.end_sharded()
        if placement.is_joined:
            x = functions.slice_features(x, self.mp_group, placement.sizes)
        y = placement.parallel_region.reduce(self.product(x, None))
        return y if self.bias is None else y + placement.parallel_region.copy_weight(self.bias)


class GatheredForward(SplitLayer):
    """In the place of a row-parallel layer, with rows of the weight: inputs and outputs are gathered.

    No sum is split, so the outputs are those of the whole layer, bit for bit.  Layers with quantized weights need
    this: they round activations, and a difference in the last bit of a sum may give the next layer another code.
    """

    def forward(self: _AnyProduct, x: Tensor) -> Tensor:
        """(..., this rank's part of in), or (..., in) if inputs are whole -> (..., out)."""
        placement = self.placement
        placement.parallel_region.end_sharded()
        if not placement.is_joined:
            x = functions.join_features(x, self.mp_group, placement.sizes)
        y = self.product(functions.copy(x, self.mp_group), self.bias)
        return placement.parallel_region.scatter(functions.join_features(y, self.mp_group, placement.output_sizes))


@final
class ColumnLinear(ColumnForward, _Product, nn.Linear):
    """nn.Linear split by outputs; `out_features` is this rank's number."""


@final
class RowLinear(RowForward, _Product, nn.Linear):
    """nn.Linear split by inputs; `in_features` is this rank's number."""


@final
class ColumnConv1D(ColumnForward, _Transposed):
    """Transformers' Conv1D split by outputs; `nf` is this rank's number."""


@final
class RowConv1D(RowForward, _Transposed):
    """Transformers' Conv1D split by inputs."""


@final
class GatheredLinear(GatheredForward, _Product, nn.Linear):
    """nn.Linear split by outputs behind split activations; `out_features` is this rank's number."""


@final
class GatheredConv1D(GatheredForward, _Transposed):
    """Transformers' Conv1D split by outputs behind split activations; `nf` is this rank's number."""


_made_classes: dict[tuple[type, type], type[nn.Module]] = {}  # by region and class of the module


def sum_gradients(module: nn.Module, parallel_region: ParallelRegion, gathers: bool) -> None:
    """Sum the gradients of the module's own parameters over the ranks; see NormShard."""
    _convert(_GradSummedGathered if gathers else _GradSummed, module, parallel_region)


def scatter_output(module: nn.Module, parallel_region: ParallelRegion) -> None:
    """Split the output of `module` by tokens."""
    _convert(_OutputScattered, module, parallel_region)


def gather_output(module: nn.Module, parallel_region: ParallelRegion) -> None:
    """Gather the tokens of the output of `module`."""
    _convert(_OutputGathered, module, parallel_region)


def _convert(region: type[_BoundaryModule], module: nn.Module, parallel_region: ParallelRegion) -> None:
    module.__class__ = _region_class(region, type(module))
    module.parallel_region = parallel_region  # type: ignore[assignment]


def _region_class(region: type[_BoundaryModule], kind: type[nn.Module]) -> type[nn.Module]:
    if (region, kind) not in _made_classes:
        _made_classes[region, kind] = type(f"{region.__name__.strip('_')}{kind.__name__}", (region, kind), {})
    return _made_classes[region, kind]


class _BoundaryModule:
    """A module converted for a parallel region, which it keeps."""

    parallel_region: ParallelRegion


class _GradSummed(_BoundaryModule):
    """Replicated weights: while the module runs they are read as copies whose gradients are all-reduced.

    A forward hook of torch runs outside of `forward` and sees the parameters themselves.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mp_group = self.parallel_region.mp_group
        own = {n: p for n, p in self.named_parameters(recurse=False) if p.requires_grad}
        if mp_group.size == 1 or not torch.is_grad_enabled() or not own:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        copies = functions.copy_all([getattr(self, name) for name in own], mp_group)
        self.__dict__["_copies"] = dict(zip(own, copies))
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            del self.__dict__["_copies"]

    def __getattr__(self, name: str) -> Any:
        copies = self.__dict__.get("_copies")
        if copies is not None and name in copies:
            return copies[name]
        return super().__getattr__(name)  # type: ignore[misc]


class _GradSummedGathered(_GradSummed):
    """The same, and all ranks' tokens are gathered from the output, for split layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _change_first(super().forward(*args, **kwargs), self.parallel_region.gather)


class _OutputScattered(_BoundaryModule):
    """Split the first output tensor by tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _change_first(super().forward(*args, **kwargs), self._split_tokens)  # type: ignore[misc]

    def _split_tokens(self, x: Tensor) -> Tensor:
        self.parallel_region.begin_scattered(x, _as_module(self))
        return self.parallel_region.scatter(x)


class _OutputGathered(_BoundaryModule):
    """Gather all tokens of the first output tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _change_first(super().forward(*args, **kwargs), self._join_tokens)  # type: ignore[misc]

    def _join_tokens(self, x: Tensor) -> Tensor:
        mp_group, dim = self.parallel_region.mp_group, self.parallel_region.sequence_dim
        self.parallel_region.random_state.restore()
        return x if mp_group.size == 1 or dim < 0 else functions.join_tokens(x, mp_group, dim)


def _as_module(region: Any) -> nn.Module:
    """Return the region as the module that it is."""
    found: nn.Module = region
    return found


def _change_first(out: Any, change: Any) -> Any:
    """Apply `change` to the first tensor of `out`."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)
