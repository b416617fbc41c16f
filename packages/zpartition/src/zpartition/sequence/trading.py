"""Activations change hands: all heads of some tokens against all tokens of some heads.

    to_heads    (..., n, ..., all heads, ...)  ->  (..., size * n, ..., own heads, ...)    before an attention
    to_tokens   (..., size * n, ..., own heads, ...)  ->  (..., n, ..., all heads, ...)    after it

Each is the other's transpose: heads that went to several ranks come back as the sum (of gradients).  All tensors of a
call travel as one message if they have one dtype and device.  Where all ranks send equally much it is an all-to-all;
else slices have sizes of their own, which every rank knows from the ranges.

Nothing here is differentiated; see ulysses.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import attrs
import torch
from torch import Tensor

import zcomm
from zpartition.cells import Cell

__all__ = ["Dims", "to_heads", "to_tokens"]

Ranges = tuple[range, ...]  # the heads of each rank


@final
@attrs.frozen
class Dims:
    """Where a tensor has its heads and its tokens; counted from the front."""

    heads: int
    tokens: int


def to_heads(tensors: Sequence[Tensor], ranges: Sequence[Ranges], dims: Dims, cell: Cell) -> list[Tensor]:
    """All tokens of this rank's heads, from all heads of its tokens; `ranges` for each of the tensors.

    Collective of the cell.  Every rank has equally many tokens.
    """
    pieces = [
        [tensor.narrow(dims.heads, found[to].start, len(found[to])) for tensor, found in zip(tensors, ranges)]
        for to in range(cell.size)
    ]
    shapes = [_with(tensor, dims.heads, len(found[cell.rank])) for tensor, found in zip(tensors, ranges)]
    sent = [[piece.numel() for piece in row] for row in pieces]
    received = _trade(pieces, [shapes] * cell.size, [sent] * cell.size, cell, "tokens to heads")
    return [torch.cat(parts, dims.tokens) for parts in zip(*received)]


def to_tokens(tensors: Sequence[Tensor], ranges: Sequence[Ranges], dims: Dims, cell: Cell) -> list[Tensor]:
    """All heads of this rank's tokens, from all tokens of its heads; heads that several ranks have are summed.

    Collective of the cell.
    """
    size = cell.size
    pieces = [
        [tensor.narrow(dims.tokens, to * n, n) for tensor in tensors for n in [tensor.shape[dims.tokens] // size]]
        for to in range(size)
    ]
    shapes = [
        [_with(piece, dims.heads, len(found[source])) for piece, found in zip(pieces[0], ranges)]
        for source in range(size)
    ]
    sent = [[[math.prod(shape) for shape in row]] * size for row in shapes]
    received = _trade(pieces, shapes, sent, cell, "heads to tokens")
    return [_joined([row[index] for row in received], found, dims.heads) for index, found in enumerate(ranges)]


def _joined(parts: Sequence[Tensor], ranges: Ranges, dim: int) -> Tensor:
    """The heads in order; those of several ranks added up."""
    if sum(map(len, ranges)) == ranges[-1].stop:
        return torch.cat(list(parts), dim)
    whole = parts[0].new_zeros(_with(parts[0], dim, ranges[-1].stop))
    for part, heads in zip(parts, ranges):
        whole.narrow(dim, heads.start, len(heads)).add_(part)
    return whole


def _with(tensor: Tensor, dim: int, length: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])


# --- messages --------------------------------------------------------------------------------------------


def _trade(
    pieces: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    numels: Sequence[Sequence[Sequence[int]]],
    cell: Cell,
    label: str,
) -> list[list[Tensor]]:
    """Send `pieces[r]` to rank r; returns what came from each, in `shapes`.

    numels: elements of each piece from rank r to rank s, the same table on all ranks.
    """
    kinds = {(piece.dtype, piece.device) for piece in pieces[0]}
    if len(kinds) > 1:  # a message has one dtype
        each = [
            _trade(
                [[row[index]] for row in pieces],
                [[row[index]] for row in shapes],
                [[[to[index]] for to in row] for row in numels],
                cell,
                label,
            )
            for index in range(len(pieces[0]))
        ]
        return [[tensors[source][0] for tensors in each] for source in range(cell.size)]
    table = [[sum(to) for to in row] for row in numels]
    outgoing = torch.cat([piece.reshape(-1) for row in pieces for piece in row])
    incoming = _exchanged(outgoing, table, cell, label)
    received = []
    for row, part in zip(shapes, torch.split(incoming, [row[cell.rank] for row in table])):
        parts = torch.split(part, [math.prod(shape) for shape in row])
        received.append([flat.view(shape) for flat, shape in zip(parts, row)])
    return received


def _exchanged(outgoing: Tensor, table: list[list[int]], cell: Cell, label: str) -> Tensor:
    if len({numel for row in table for numel in row}) > 1:
        return zcomm.exchange_slices(outgoing, table, cell.group, label=label)
    incoming = torch.empty_like(outgoing)
    zcomm.all_to_all(incoming, outgoing, cell.group, label=label)
    return incoming
