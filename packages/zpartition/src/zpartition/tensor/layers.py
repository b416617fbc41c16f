"""Linear layers of which each rank has a part.

They are made out of layers that exist, by changing the class: the module keeps its name, identity, hooks and
parameters, whose memory becomes the part.  So ties stay ties, an optimizer that was made before still holds the right
parameters, and `isinstance(layer, nn.Linear)` stays true.

Two storage orders: nn.Linear's weight is (out, in), that of the Conv1D of Transformers (GPT-2) is (in, out).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import attrs
from torch import Tensor, nn
from torch.nn.functional import linear

from zpartition.cells import Cell
from zpartition.shard import Address
from zpartition.tensor import functions
from zpartition.tensor.entrance import Entrance

__all__ = ["ColumnConv1D", "ColumnLinear", "Place", "Placed", "RowConv1D", "RowLinear"]


@final
@attrs.frozen(eq=False)
class Place:
    """Where a layer is among its parts."""

    entrance: Entrance
    addresses: Mapping[str, Address]  # of its parameters, by their names in it
    sizes: tuple[int, ...]  # of all ranks' parts, along the dim that is shared out
    is_joined: bool = False  # the side that is shared out is whole for those around: joined behind, or cut before


class Placed:
    """What all layers with parts have; makes them `Celled`."""

    place: Place

    @property
    def cell(self) -> Cell:
        """The ranks that have the other parts."""
        return self.place.entrance.cell

    def addresses(self) -> Mapping[str, Address]:
        """Of the parameters, by their names here."""
        return self.place.addresses


class _Product(nn.Module):
    """What is the same for both storage orders."""

    weight: Tensor
    bias: Any  # Tensor or None

    def kernel(self) -> Tensor:
        """(out, in)."""
        return self.weight


class _Transposed(_Product):
    """A weight that is stored as (in, out)."""

    def kernel(self) -> Tensor:
        return self.weight.t()


class _Column(Placed, _Product):
    """Whole inputs, this rank's outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., this rank's part of out), or (..., out) where outputs are joined."""
        place = self.place
        y = linear(place.entrance.enter(x), self.kernel(), self.bias)
        if place.is_joined:
            return functions.all_features(y, self.cell, place.sizes)
        place.entrance.parted(x, self)
        return y


class _Row(Placed, _Product):
    """This rank's inputs, whole outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., this rank's part of in), or (..., in) where inputs come whole -> (..., out)."""
        place = self.place
        place.entrance.joining()
        if place.is_joined:
            x = functions.own_features(x, self.cell, place.sizes)
        y = place.entrance.leave(linear(x, self.kernel()))
        return y if self.bias is None else y + place.entrance.share(self.bias)


@final
class ColumnLinear(_Column, nn.Linear):
    """nn.Linear, split by outputs; `out_features` is this rank's number."""


@final
class RowLinear(_Row, nn.Linear):
    """nn.Linear, split by inputs; `in_features` is this rank's number."""


@final
class ColumnConv1D(_Column, _Transposed):
    """Transformers' Conv1D, split by outputs; `nf` is this rank's number."""


@final
class RowConv1D(_Row, _Transposed):
    """Transformers' Conv1D, split by inputs."""
