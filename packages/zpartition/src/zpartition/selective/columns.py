"""Columns of matrices in flat shards: sums over them, and the positions of selected ones.

A shard holds a run of each matrix in row-major order, so it has a part of every column.  Sums over columns are
therefore summed over the ranks of a copy, and all ranks select the same columns, at any world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import attrs
import torch
from torch import Tensor

from zpartition.layout.layout import Layout, Piece
from zpartition.layout.selective import is_matrix, num_columns

__all__ = ["MatrixTable", "ShardColumns", "piece_sums"]


@final
@attrs.frozen(eq=False)
class MatrixTable:
    """All matrices of a layout, with their places in vectors that ranks sum."""

    shapes: Mapping[str, tuple[int, ...]]  # by name, in the order of the layout
    places: Mapping[str, slice]  # of a matrix's columns in a vector of all columns
    numbers: Mapping[str, int]  # of the matrix

    @classmethod
    def of(cls, layout: Layout) -> MatrixTable:
        """List the matrices of `layout`."""
        shapes = {slot.name: slot.shape for _, slot in layout.slots() if is_matrix(slot.shape)}
        places, end = {}, 0
        for name, shape in shapes.items():
            places[name] = slice(end, end + num_columns(shape))
            end += num_columns(shape)
        return cls(shapes, places, {name: number for number, name in enumerate(shapes)})

    @property
    def num_columns(self) -> int:
        """Columns of all matrices."""
        return max((place.stop for place in self.places.values()), default=0)


@final
@attrs.frozen(eq=False)
class ShardColumns:
    """Elements of one shard that are updated in every step, and the runs of its matrices."""

    index: Tensor  # (selected,) int64 on the host, ascending: positions in the shard
    matrices: Tensor  # (pieces,) int64: number of each piece's matrix; -1 for a vector
    lengths: Tensor  # (2 pieces + 1,) int64: numel of gap, piece, gap, ..., gap
    selected: Tensor  # (pieces,) int64: number of selected elements

    @classmethod
    def of(
        cls, pieces: Sequence[Piece], numel: int, table: MatrixTable, chosen: Mapping[str, Tensor]
    ) -> ShardColumns:
        """Find the elements of `chosen` columns, by name, and of everything without columns.  numel: of the shard."""
        found = [_positions(piece, chosen.get(piece.slot.name)) for piece in pieces]
        ends = [0, *(end for piece in pieces for end in (piece.offset, piece.offset + piece.numel)), numel]
        return cls(
            index=torch.cat([torch.empty(0, dtype=torch.int64), *found]),
            matrices=torch.tensor([table.numbers.get(piece.slot.name, -1) for piece in pieces], dtype=torch.int64),
            lengths=torch.tensor(ends, dtype=torch.int64).diff(),
            selected=torch.tensor([part.numel() for part in found], dtype=torch.int64),
        )

    def add_magnitudes(self, sums: Tensor, gradient: Tensor, columns: Tensor) -> None:
        """Add to `sums`, (2, matrices) float64, sums of |gradient|: over columns, and over everything.

        gradient: (shard numel,) on the host; columns: (selected,) its selected elements.
        """
        of_matrix = self.matrices >= 0
        if not bool(of_matrix.any()):
            return
        parts = (columns.abs(), self.selected), (gradient.abs(), self.lengths)
        by_piece = [torch.segment_reduce(values, "sum", lengths=lengths, initial=0) for values, lengths in parts]
        for total, found in zip(sums, (by_piece[0], by_piece[1][1::2])):
            total.index_add_(0, self.matrices[of_matrix], found[of_matrix].double())

    def add_counts(self, counts: Tensor) -> None:
        """Add to `counts`, (2, matrices) float64, the numbers of these elements."""
        of_matrix = self.matrices >= 0
        for total, found in zip(counts, (self.selected, self.lengths[1::2])):
            total.index_add_(0, self.matrices[of_matrix], found[of_matrix].double())


def piece_sums(sums: Tensor, pieces: Sequence[Piece], gradient: Tensor, table: MatrixTable) -> None:
    """Add the sums of |gradient|, (shard numel,), over the columns of a shard to `sums`, (all columns,) float64."""
    for piece in pieces:
        if piece.slot.name not in table.places or not piece.numel:
            continue
        total = sums[table.places[piece.slot.name]]
        values = gradient[piece.offset : piece.offset + piece.numel]
        for part, first in _rows(values, piece.span[0], total.numel()):
            total[first : first + part.shape[1]] += part.abs().sum(0, dtype=torch.float64)


def _rows(values: Tensor, start: int, width: int) -> Iterator[tuple[Tensor, int]]:
    """Yield (rows, parts of columns) of a run that begins at element `start` of a matrix, and the first column."""
    head = min(-start % width, values.numel())
    body = (values.numel() - head) // width * width
    for first, end, column in ((0, head, start % width), (head, head + body, 0), (head + body, values.numel(), 0)):
        if first < end:
            yield values[first:end].view(-1, min(width, end - first)), column


def _positions(piece: Piece, chosen: Tensor | None) -> Tensor:
    """Return the positions in the shard of a piece's `chosen` columns; None: of all its elements."""
    if chosen is None:
        return torch.arange(piece.offset, piece.offset + piece.numel)
    start, stop = piece.span
    width = num_columns(piece.slot.shape)
    rows = torch.arange(start // width, -(-stop // width))
    found = (rows[:, None] * width + chosen).flatten()
    return found[(found >= start) & (found < stop)] + (piece.offset - start)
