"""How one layer is split: values, and the arithmetic of their cuts.

A weight is cut in *units*, runs of rows (or columns) that stay together: a head, or a group of query heads with the
key-value head that they share, or one element.  Units that do not divide evenly leave the first ranks one more.
"""

from __future__ import annotations

import itertools

import attrs
from attrs.validators import ge

from zpartition.shard import Address, Box

__all__ = ["Column", "Gather", "Row", "Scatter", "Style", "Summed", "Vocabulary", "Whole", "cut_along", "shares"]


@attrs.frozen(kw_only=True)
class Column:
    """A linear layer whose outputs are shared out: each rank has some rows of the weight, and of the bias."""

    units: int = attrs.field(default=0, validator=ge(0))  # that stay together; 0: the attention's heads, or elements
    blocks: tuple[int, ...] = ()  # rows of each of several fused layers ([q; k; v]), every one cut by itself
    gathers: bool = False  # whether every rank gets all outputs


@attrs.frozen(kw_only=True)
class Row:
    """A linear layer whose inputs are shared out: each rank has some columns of the weight; products are summed."""

    units: int = attrs.field(default=0, validator=ge(0))  # as those of the column layer before it
    takes_part: bool = False  # whether every rank is given all inputs


@attrs.frozen(kw_only=True)
class Vocabulary:
    """An embedding of which each rank has some rows."""

    scatters: bool = False  # whether its outputs are split by tokens (in a plan with sequence_dim)


@attrs.frozen(kw_only=True)
class Summed:
    """Whole weights of which each rank gets a part of the gradient: norms of a rank's tokens, or of its heads."""

    gathers: bool = False  # whether all tokens come out, for split layers (in a plan with sequence_dim)


@attrs.frozen
class Whole:
    """Left as it is: every rank computes the same."""


@attrs.frozen
class Scatter:
    """A module behind which activations are split by tokens (in a plan with sequence_dim)."""


@attrs.frozen
class Gather:
    """A module behind which they are whole again."""


Style = Column | Row | Vocabulary | Summed | Whole | Scatter | Gather


def shares(num_units: int, num_ranks: int) -> list[tuple[int, int]]:
    """[lo, hi) of the units of each rank."""
    least, more = divmod(num_units, num_ranks)
    ends = [rank * least + min(rank, more) for rank in range(num_ranks + 1)]
    return list(itertools.pairwise(ends))


def cut_along(
    shape: tuple[int, ...], dim: int, num_units: int, share: tuple[int, int], blocks: tuple[int, ...] = ()
) -> Address:
    """The address of units `share` along `dim` of a tensor of `shape`; of each block, where there are several.

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
