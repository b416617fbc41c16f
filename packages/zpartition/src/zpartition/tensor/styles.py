"""Styles: how one layer is split, as values, and the arithmetic of units.

A weight is split in *units*, runs of rows (or columns) that stay together: a head, or a group of query heads with
their shared key-value head, or one element.  If units do not divide evenly, the first ranks get one more.
"""

from __future__ import annotations

import enum
import itertools

import attrs
from attrs.validators import ge

from zpartition.layout.address import Address, Box

__all__ = [
    "Column",
    "Gather",
    "NormShard",
    "Replicated",
    "Row",
    "RowSplit",
    "Scatter",
    "Style",
    "Vocabulary",
    "split_along",
    "unit_ranges",
]


@attrs.frozen(kw_only=True)
class Column:
    """Column-parallel linear layer: outputs are split; each rank holds some rows of the weight and of the bias."""

    units: int = attrs.field(default=0, validator=ge(0))  # that stay together; 0: the attention's heads, or elements
    blocks: tuple[int, ...] = ()  # rows of each of several fused layers ([q; k; v]), each split separately
    gathers: bool = False  # every rank gets all outputs


class RowSplit(enum.Enum):
    """What a rank holds of the layer behind a column-parallel one."""

    INPUTS = "inputs"  # columns of the weight; products are summed, by one all-reduce
    OUTPUTS = "outputs"  # rows; inputs and outputs are gathered, and no sum is split: bits as in the whole layer


@attrs.frozen(kw_only=True)
class Row:
    """Row-parallel linear layer: inputs are split; each rank holds columns of the weight; products are summed."""

    units: int = attrs.field(default=0, validator=ge(0))  # as those of the column layer before it
    takes_part: bool = False  # every rank gets all inputs
    split: RowSplit = attrs.field(default=RowSplit.INPUTS, repr=lambda split: split.name)


@attrs.frozen(kw_only=True)
class Vocabulary:
    """Embedding of which each rank holds some rows."""

    scatters: bool = False  # outputs are split by tokens (in a plan with sequence_dim)


@attrs.frozen(kw_only=True)
class NormShard:
    """Replicated weights applied to a shard of the activations: norms of a rank's tokens or heads.

    Gradients are summed.
    """

    gathers: bool = False  # outputs are all tokens, for split layers (in a plan with sequence_dim)


@attrs.frozen
class Replicated:
    """Replicated layer: every rank computes the same."""


@attrs.frozen
class Scatter:
    """Split the module's output by tokens (in a plan with sequence_dim)."""


@attrs.frozen
class Gather:
    """Gather the tokens of the module's output."""


Style = Column | Row | Vocabulary | NormShard | Replicated | Scatter | Gather


def unit_ranges(num_units: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return [lo, hi) of the units of each rank."""
    least, more = divmod(num_units, num_ranks)
    ends = [rank * least + min(rank, more) for rank in range(num_ranks + 1)]
    return list(itertools.pairwise(ends))


def split_along(
    shape: tuple[int, ...], dim: int, num_units: int, share: tuple[int, int], blocks: tuple[int, ...] = ()
) -> Address:
    """Return the address of units `share` along `dim` of a tensor of `shape`; of each block, if there are several.

    blocks: sizes along dim 0, each a multiple of `num_units` as `shape[dim]` is.
    """
    boxes: list[Box] = []
    start = 0
    for size in blocks or (shape[dim],):
        unit = size // num_units
        side = (start + share[0] * unit, start + share[1] * unit)
        if boxes and boxes[-1][dim][1] == side[0]:
            side = (boxes.pop()[dim][0], side[1])
        boxes.append(tuple(side if at == dim else (0, length) for at, length in enumerate(shape)))
        start += size
    return Address(tuple(shape), tuple(boxes))
