"""From a module and a style to the cut of its parameters: what fits what, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from zpartition.shard import Address
from zpartition.tensor.layers import ColumnConv1D, ColumnLinear, Placed, RowConv1D, RowLinear
from zpartition.tensor.styles import Column, Row, Style, Vocabulary, cut_along, shares
from zpartition.tensor.vocabulary import embedding_in_parts

__all__ = ["CONV1D", "LINEAR", "Cut", "Kind", "kind_of", "placed"]


@attrs.frozen
class Kind:
    """A kind of linear layer that can be split, and what it becomes."""

    column: type[nn.Module]
    row: type[nn.Module]
    out_dim: int  # of the stored weight
    names: tuple[str, str]  # attributes that hold the numbers of outputs and inputs

    @property
    def in_dim(self) -> int:
        """Of the stored weight."""
        return 1 - self.out_dim

    def shape(self, module: nn.Module) -> tuple[int, int]:
        """(outputs, inputs)."""
        weight: Any = module.weight
        return weight.shape[self.out_dim], weight.shape[self.in_dim]


LINEAR = Kind(ColumnLinear, RowLinear, 0, ("out_features", "in_features"))
CONV1D = Kind(ColumnConv1D, RowConv1D, 1, ("nf", "nx"))


@attrs.frozen
class Cut:
    """What becomes of one module on one rank."""

    module: str
    style: Style
    addresses: Mapping[str, Address] = attrs.field(factory=dict)  # of its own parameters that are cut, or copied
    sizes: tuple[int, ...] = ()  # of all ranks' parts
    num_units: int = 1
    own_units: int = 1  # this rank's


def kind_of(module: nn.Module) -> Kind | None:
    """How `module` can be split; None if it is no linear layer that is known here."""
    if type(module) is nn.Linear:
        return LINEAR
    # Transformers' layer, by its looks: nothing of that package is imported
    is_conv1d = type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "weight")
    return CONV1D if is_conv1d else None


def placed(name: str, module: nn.Module, style: Style, num_ranks: int, rank: int) -> Cut:
    """The cut of one module; pure.  Raises ValueError, with numbers, if the style does not fit it."""
    if isinstance(module, Placed):
        raise ValueError(f"{name} is split already: a model is made tensor parallel once.")
    if isinstance(style, Column | Row):
        return _linear(name, module, style, num_ranks, rank)
    if isinstance(style, Vocabulary):
        return _embedding(name, module, style, num_ranks, rank)
    return Cut(name, style)


def _linear(name: str, module: nn.Module, style: Column | Row, num_ranks: int, rank: int) -> Cut:
    kind = kind_of(module)
    if kind is None:
        raise ValueError(
            f"{name} is a {type(module).__name__}, and {type(style).__name__}() splits torch's Linear and "
            "Transformers' Conv1D themselves, no subclasses. Leave it out of the plan, or put a Linear there."
        )
    weight: Any = module.weight
    dim, size = (
        (kind.out_dim, kind.shape(module)[0]) if isinstance(style, Column) else (kind.in_dim, kind.shape(module)[1])
    )
    blocks = style.blocks if isinstance(style, Column) else ()
    _refuse_blocks(name, style, size, blocks, kind)
    _refuse_units(name, size, style.units, blocks or (size,), num_ranks)
    ranges = shares(style.units, num_ranks)
    parts = tuple((hi - lo) * (size // style.units) for lo, hi in ranges)
    addresses = {"weight": cut_along(tuple(weight.shape), dim, style.units, ranges[rank], blocks)}
    bias: Any = module.bias
    if bias is not None and isinstance(style, Column):
        addresses["bias"] = cut_along(tuple(bias.shape), 0, style.units, ranges[rank], blocks)
    elif bias is not None:
        addresses["bias"] = Address.whole(bias.shape, num_ranks, rank)
    return Cut(name, style, addresses, parts, style.units, ranges[rank][1] - ranges[rank][0])


def _embedding(name: str, module: nn.Module, style: Vocabulary, num_ranks: int, rank: int) -> Cut:
    if not isinstance(module, nn.Embedding) or embedding_in_parts(module) is None:
        raise ValueError(
            f"{name} is a {type(module).__name__}, and Vocabulary() splits torch's Embedding alone, and subclasses "
            "that call its forward."
        )
    extras = {"max_norm": module.max_norm, "scale_grad_by_freq": module.scale_grad_by_freq, "sparse": module.sparse}
    if wrong := [f"{key}={value}" for key, value in extras.items() if value]:
        raise ValueError(f"{name} was made with {', '.join(wrong)}, which an embedding in parts does not know.")
    rows = module.num_embeddings
    _refuse_units(name, rows, rows, (rows,), num_ranks)
    ranges = shares(rows, num_ranks)
    address = cut_along(tuple(module.weight.shape), 0, rows, ranges[rank])
    return Cut(name, style, {"weight": address}, tuple(hi - lo for lo, hi in ranges))


def _refuse_blocks(name: str, style: Column | Row, size: int, blocks: tuple[int, ...], kind: Kind) -> None:
    if blocks and sum(blocks) != size:
        raise ValueError(
            f"{name} has {size} outputs, and the blocks {list(blocks)} of its style add up to {sum(blocks)}: "
            "give the rows of each fused layer in order."
        )
    if len(blocks) > 1 and kind is CONV1D:
        raise ValueError(
            f"{name} is a Conv1D, whose weight is (in, out): parts of several blocks of its columns are "
            "not contiguous. Use Column(gathers=True), and Row(takes_part=True) for the layer that follows."
        )
    if isinstance(style, Column) and style.gathers and len(blocks) > 1:
        raise ValueError(f"{name}: outputs that are gathered need no blocks; leave blocks out, or gathers.")


def _refuse_units(name: str, size: int, units: int, sizes: tuple[int, ...], num_ranks: int) -> None:
    if not units or any(each % units for each in sizes):
        raise ValueError(
            f"{name}: {' and '.join(map(str, sizes))} cannot be cut into {units} equal units. Give units= a number "
            f"that divides {'each' if len(sizes) > 1 else 'it'}, such as the number of heads."
        )
    if units < num_ranks:
        raise ValueError(
            f"{name}: {units} units of {size // units} cannot be shared out over {num_ranks} tensor ranks: "
            f"each needs one at least. Use {units} tensor ranks or fewer, or leave the layer whole with Whole()."
        )
