"""Split linear layers, of which each rank holds a part.

They are made from existing layers by changing the class: the module keeps its name, identity, hooks and parameters,
whose data become the part.  So ties stay ties, an optimizer that exists already holds the right parameters, and
`isinstance(layer, nn.Linear)` stays true.

Two storage orders: nn.Linear's weight is (out, in), that of the Conv1D of Transformers (GPT-2) is (in, out).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import attrs
from torch import Tensor, nn
from torch.nn.functional import linear

from zpartition.layout.address import Address
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.tensor import functions
from zpartition.tensor.parallel_region import ParallelRegion

__all__ = ["ColumnConv1D", "ColumnLinear", "LayerPlacement", "RowConv1D", "RowLinear", "SplitLayer"]


@final
@attrs.frozen(eq=False)
class LayerPlacement:
    """The part of a layer that this rank holds."""

    parallel_region: ParallelRegion
    addresses: Mapping[str, Address]  # of its parameters, by their names in it
    sizes: tuple[int, ...]  # of all ranks' parts, along the split dim
    is_joined: bool = False  # the split side is whole outside of the layer: outputs gathered, or inputs narrowed


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


class _Transposed(_Product):
    """A weight stored as (in, out)."""

    def kernel(self) -> Tensor:
        return self.weight.t()


class _ColumnForward(SplitLayer, _Product):
    """Column-parallel: whole inputs, this rank's outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., this rank's part of out), or (..., out) if outputs are gathered."""
        placement = self.placement
        y = linear(placement.parallel_region.enter(x), self.kernel(), self.bias)
        if placement.is_joined:
            return functions.all_features(y, self.mp_group, placement.sizes)
        placement.parallel_region.begin_sharded(x, self)
        return y


class _RowForward(SplitLayer, _Product):
    """Row-parallel: this rank's inputs, whole outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., this rank's part of in), or (..., in) if inputs are whole -> (..., out)."""
        placement = self.placement
        placement.parallel_region.end_sharded()
        if placement.is_joined:
            x = functions.own_features(x, self.mp_group, placement.sizes)
        y = placement.parallel_region.reduce(linear(x, self.kernel()))
        return y if self.bias is None else y + placement.parallel_region.copy_weight(self.bias)


@final
class ColumnLinear(_ColumnForward, nn.Linear):
    """nn.Linear split by outputs; `out_features` is this rank's number."""


@final
class RowLinear(_RowForward, nn.Linear):
    """nn.Linear split by inputs; `in_features` is this rank's number."""


@final
class ColumnConv1D(_ColumnForward, _Transposed):
    """Transformers' Conv1D split by outputs; `nf` is this rank's number."""


@final
class RowConv1D(_RowForward, _Transposed):
    """Transformers' Conv1D split by inputs."""
