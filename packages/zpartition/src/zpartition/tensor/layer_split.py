"""Split of one layer's parameters under a style, and checks that they fit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from zpartition.layout.address import Address
from zpartition.tensor.layers import (
    ColumnConv1D,
    ColumnLinear,
    GatheredConv1D,
    GatheredLinear,
    RowConv1D,
    RowLinear,
    SplitLayer,
)
from zpartition.tensor.styles import Column, Row, RowSplit, Style, Vocabulary, split_along, unit_ranges
from zpartition.tensor.vocabulary import vocabulary_class

__all__ = ["CONV1D", "LINEAR", "LayerSplit", "LinearKind", "linear_kind", "split_layer"]


@attrs.frozen
class LinearKind:
    """A kind of linear layer that can be split, and its split classes.

    A class of another package has its kind as the attribute `linear_kind`; its weight may be a `QuantizedWeight`.
    """

    column: type[nn.Module]
    row: type[nn.Module]
    gathered: type[nn.Module]  # of Row(split=RowSplit.OUTPUTS)
    out_dim: int  # of the stored weight
    names: tuple[str, str]  # attributes that hold the numbers of outputs and inputs

    @property
    def in_dim(self) -> int:
        """Input dim of the stored weight."""
        return 1 - self.out_dim

    def shape(self, module: nn.Module) -> tuple[int, int]:
        """Return (outputs, inputs)."""
        weight: Any = module.weight
        return weight.shape[self.out_dim], weight.shape[self.in_dim]

    def class_of(self, style: Column | Row) -> type[nn.Module]:
        """Return the split class of a style."""
        if isinstance(style, Column):
            return self.column
        return self.gathered if style.split is RowSplit.OUTPUTS else self.row

    def local_size(self, style: Column | Row) -> tuple[str, int]:
        """Return the attribute that becomes this rank's number, and its place in `shape`."""
        side = 0 if isinstance(style, Column) or style.split is RowSplit.OUTPUTS else 1
        return self.names[side], side


LINEAR = LinearKind(ColumnLinear, RowLinear, GatheredLinear, 0, ("out_features", "in_features"))
CONV1D = LinearKind(ColumnConv1D, RowConv1D, GatheredConv1D, 1, ("nf", "nx"))


@attrs.frozen
class LayerSplit:
    """The split of one module on one rank."""

    module: str
    style: Style
    addresses: Mapping[str, Address] = attrs.field(factory=dict)  # of its split or replicated parameters
    sizes: tuple[int, ...] = ()  # of all ranks' parts
    output_sizes: tuple[int, ...] = ()  # of all ranks' outputs, if inputs and outputs are split
    num_units: int = 1
    own_units: int = 1  # this rank's


def linear_kind(module: nn.Module) -> LinearKind | None:
    """Return how `module` can be split; None if it is no supported linear layer."""
    if type(module) is nn.Linear:
        return LINEAR
    own = vars(type(module)).get("linear_kind")
    if isinstance(own, LinearKind):
        return own
    # Transformers' layer, recognized by its attributes: that package is not imported
    is_conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "weight")
    return CONV1D if is_conv1d else None


def split_layer(name: str, module: nn.Module, style: Style, num_ranks: int, rank: int) -> LayerSplit:
    """Compute the split of one module; pure.  Raises ValueError, with numbers, if the style does not fit."""
    if isinstance(module, SplitLayer):
        raise ValueError(f"{name} is split already: parallelize() may be called once for a model.")
    if isinstance(style, Column | Row):
        return _split_linear(name, module, style, num_ranks, rank)
    if isinstance(style, Vocabulary):
        return _split_embedding(name, module, style, num_ranks, rank)
    return LayerSplit(name, style)


def _split_linear(name: str, module: nn.Module, style: Column | Row, num_ranks: int, rank: int) -> LayerSplit:
    kind = linear_kind(module)
    if kind is None:
        raise ValueError(
            f"{name} is a {type(module).__name__}, but {type(style).__name__}() splits only torch's Linear and "
            "Transformers' Conv1D, no subclasses. Leave it out of the plan, or use a Linear."
        )
    weight: Any = module.weight
    dim, size = (
        (kind.out_dim, kind.shape(module)[0]) if isinstance(style, Column) else (kind.in_dim, kind.shape(module)[1])
    )
    blocks = style.blocks if isinstance(style, Column) else ()
    _check_blocks(name, style, size, blocks, kind)
    _check_units(name, size, style.units, blocks or (size,), num_ranks)
    ranges = unit_ranges(style.units, num_ranks)
    parts = tuple((hi - lo) * (size // style.units) for lo, hi in ranges)
    own_units = ranges[rank][1] - ranges[rank][0]
    if isinstance(style, Row) and style.split is RowSplit.OUTPUTS:
        addresses, outputs = _by_outputs(name, module, kind, num_ranks, rank)
        return LayerSplit(name, style, addresses, parts, outputs, style.units, own_units)
    if isinstance(style, Row):
        _check_groups(name, weight, parts)
    addresses = {"weight": split_along(tuple(weight.shape), dim, style.units, ranges[rank], blocks)}
    bias: Any = module.bias
    if bias is not None and isinstance(style, Column):
        addresses["bias"] = split_along(tuple(bias.shape), 0, style.units, ranges[rank], blocks)
    elif bias is not None:
        addresses["bias"] = Address.whole(bias.shape, num_ranks, rank)
    return LayerSplit(name, style, addresses, parts, num_units=style.units, own_units=own_units)


def _by_outputs(
    name: str, module: nn.Module, kind: LinearKind, num_ranks: int, rank: int
) -> tuple[dict[str, Address], tuple[int, ...]]:
    """Return the addresses of parameters that are split by single outputs, and the ranks' numbers of outputs."""
    weight, bias = _untyped(module).weight, _untyped(module).bias
    size = kind.shape(module)[0]
    _check_units(name, size, size, (size,), num_ranks)
    ranges = unit_ranges(size, num_ranks)
    addresses = {"weight": split_along(tuple(weight.shape), kind.out_dim, size, ranges[rank])}
    if bias is not None:
        addresses["bias"] = split_along(tuple(bias.shape), 0, size, ranges[rank])
    return addresses, tuple(hi - lo for lo, hi in ranges)


def _untyped(module: Any) -> Any:
    return module


def _check_groups(name: str, weight: Any, parts: tuple[int, ...]) -> None:
    """Raise ValueError if a quantized weight would be cut inside a group."""
    unit = getattr(weight, "unit", 1)
    ends = list(itertools.accumulate(parts))[:-1]
    if wrong := [end for end in ends if end % unit]:
        raise ValueError(
            f"{name}: its inputs are split at {', '.join(map(str, wrong))}, but its quantized weight can be cut at "
            f"multiples of {unit} inputs only. Use by_outputs(plan), which cuts the weight by outputs, or "
            f"units= of a multiple of {unit} inputs here and in the column layer before it."
        )


def _split_embedding(name: str, module: nn.Module, style: Vocabulary, num_ranks: int, rank: int) -> LayerSplit:
    if not isinstance(module, nn.Embedding) or vocabulary_class(module) is None:
        raise ValueError(
            f"{name} is a {type(module).__name__}, but Vocabulary() splits only torch's Embedding and subclasses "
            "that call its forward."
        )
    extras = {"max_norm": module.max_norm, "scale_grad_by_freq": module.scale_grad_by_freq, "sparse": module.sparse}
    if unsupported := [f"{key}={value}" for key, value in extras.items() if value]:
        raise ValueError(f"{name} has {', '.join(unsupported)}, which a split embedding does not support.")
    rows = module.num_embeddings
    _check_units(name, rows, rows, (rows,), num_ranks)
    ranges = unit_ranges(rows, num_ranks)
    address = split_along(tuple(module.weight.shape), 0, rows, ranges[rank])
    return LayerSplit(name, style, {"weight": address}, tuple(hi - lo for lo, hi in ranges))


def _check_blocks(name: str, style: Column | Row, size: int, blocks: tuple[int, ...], kind: LinearKind) -> None:
    if blocks and sum(blocks) != size:
        raise ValueError(
            f"{name} has {size} outputs, but the blocks {list(blocks)} of its style add up to {sum(blocks)}: give "
            "the rows of each fused layer in order."
        )
    if len(blocks) > 1 and kind is CONV1D:
        raise ValueError(
            f"{name} is a Conv1D, whose weight is (in, out): parts of several blocks of its columns are "
            "not contiguous. Use Column(gathers=True), and Row(takes_part=True) for the layer that follows."
        )
    if isinstance(style, Column) and style.gathers and len(blocks) > 1:
        raise ValueError(f"{name}: gathered outputs need no blocks; leave out blocks or gathers.")


def _check_units(name: str, size: int, units: int, sizes: tuple[int, ...], num_ranks: int) -> None:
    if not units or any(each % units for each in sizes):
        raise ValueError(
            f"{name}: {' and '.join(map(str, sizes))} cannot be split into {units} equal units. Set units= to a "
            f"number that divides {'each' if len(sizes) > 1 else 'it'}, such as the number of heads."
        )
    if units < num_ranks:
        raise ValueError(
            f"{name}: {units} units of {size // units} cannot be split over {num_ranks} tensor ranks: each rank "
            f"needs one. Use at most {units} tensor ranks, or keep the layer whole with Replicated()."
        )
