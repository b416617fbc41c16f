"""Position of tensors in the flat buffers of a compressed all-reduce, and in its messages (compressed.py)."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import final

import attrs
import torch
from torch import Tensor

from zcomm.collectives.sign_codes import ROW

__all__ = ["SCALE_BYTES", "FlatBuffer", "Piece", "SignLayout", "Tables", "round_up"]

SCALE_BYTES = 4


@attrs.frozen
class FlatBuffer:
    """One flat tensor, cut into equal spans."""

    numel: int  # a multiple of 8 x ranks
    parts: tuple[tuple[int, int], ...]  # [lo, hi) of each tensor, in order; lo is a multiple of 8


@attrs.frozen
class Piece:
    """The part of one tensor in one span."""

    tensor: int  # index over all buffers
    owner: int  # rank of the span
    buffer: int
    begin: int  # its first element in the buffer
    lo: int  # [lo, hi) of the owner's part of the workspace
    hi: int


@final
@attrs.frozen
class SignLayout:
    """Position of every tensor in flat buffers, and the rank that owns each span."""

    buffers: tuple[FlatBuffer, ...]
    size: int  # number of ranks
    tensors: tuple[tuple[int, int, int], ...]  # (buffer, begin, elements without padding) of each tensor
    fused: bool = False  # all tensors share one scale

    @classmethod
    def of_buffers(
        cls, buffers: Sequence[tuple[int, Sequence[tuple[int, int]]]], size: int, *, fused: bool = False
    ) -> SignLayout:
        """Lay out given buffers: (elements, [lo, hi) of each tensor in them).

        fused: all tensors share one scale, of a worker and of a server.
        Raises ValueError if a buffer does not divide into spans of whole bytes, or a tensor begins within a byte.
        """
        made = tuple(FlatBuffer(numel, tuple((lo, hi) for lo, hi in parts)) for numel, parts in buffers)
        for index, buffer in enumerate(made):
            begins = [lo for lo, _ in buffer.parts]
            if buffer.numel % (ROW * size) or any(lo % ROW for lo in begins):
                raise ValueError(
                    f"buffer {index} has {buffer.numel} elements and tensors at {begins[:5]}; "
                    f"over {size} ranks its length must be a multiple of {ROW * size}, and tensors must begin at "
                    f"multiples of {ROW}."
                )
        tensors = tuple((index, lo, hi - lo) for index, buffer in enumerate(made) for lo, hi in buffer.parts)
        return cls(made, size, tensors, fused)

    @classmethod
    def packed(cls, numels: Sequence[int], size: int, *, fused: bool = False) -> SignLayout:
        """Pack tensors of these lengths into one buffer.  fused: see `of_buffers`."""
        begin, parts = 0, []
        for numel in numels:
            parts.append((begin, begin + numel))
            begin += round_up(numel, ROW)
        return cls.of_buffers([(round_up(max(begin, 1), ROW * size), parts)], size, fused=fused)

    @classmethod
    def by_tensor(cls, numels: Sequence[int], size: int, *, padded: bool = False) -> SignLayout:
        """Cut each tensor into one chunk a rank, as DeepSpeed does: every rank sends a scale for each tensor.

        padded: padding counts in the divisors of scales, and keeps errors.
        """
        buffers = []
        for numel in numels:
            whole = round_up(max(numel, 1), ROW * size)
            buffers.append(FlatBuffer(whole, ((0, whole if padded else numel),)))
        return cls(tuple(buffers), size, tuple((index, 0, numel) for index, numel in enumerate(numels)))

    @property
    def span_numel(self) -> int:
        """Elements of all buffers that one rank owns."""
        return sum(buffer.numel for buffer in self.buffers) // self.size

    @property
    def header_bytes(self) -> int:
        """Bytes of the scales in a message: as many as the owner of most pieces has."""
        return SCALE_BYTES * max([1, *collections.Counter(piece.owner for piece in self.pieces()).values()])

    @property
    def message_bytes(self) -> int:
        """Bytes of the message of one phase from one rank to another: scales, and a bit for each element."""
        return self.header_bytes + round_up(self.span_numel // ROW, SCALE_BYTES)

    @property
    def error_bytes(self) -> int:
        """Bytes of the errors on one rank, of worker and server; a world of one has none."""
        return (self.size + 1) * self.span_numel * torch.float32.itemsize if self.size > 1 else 0

    @property
    def latest_bytes(self) -> int:
        """Bytes of the last result, encoded, on one rank."""
        return self.size * self.message_bytes if self.size > 1 else 0

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of all tensors, by owner."""
        for owner in range(self.size):
            start = first = 0
            for index, buffer in enumerate(self.buffers):
                span = buffer.numel // self.size
                for tensor, (lo, hi) in enumerate(buffer.parts, first):
                    begin, end = max(lo, owner * span), min(hi, (owner + 1) * span)
                    if begin < end:
                        yield Piece(
                            0 if self.fused else tensor,
                            owner,
                            index,
                            begin,
                            start + begin - owner * span,
                            start + end - owner * span,
                        )
                start, first = start + span, first + len(buffer.parts)


@final
@attrs.frozen(eq=False)
class Tables:
    """What follows from a layout, as tensors on the device."""

    views: tuple[slice, ...]  # by piece, by owner: its elements in the workspace
    of_owner: tuple[slice, ...]  # by rank: the pieces that it owns
    piece_of: Tensor  # (rows of the workspace,) int32: index of the piece; the number of pieces for padding
    pieces_of: Tensor  # (tensors, ranks) int64: pieces of each tensor; the number of pieces where there are fewer
    tensor_of: Tensor  # (pieces,) int64
    tensor_roots: Tensor  # (tensors,) float32: square root of the number of elements
    piece_roots: Tensor  # (pieces,) float32
    slots: Tensor  # (ranks, scales of a message) int64: pieces of each owner; the number of pieces for padding
    tails: tuple[Tensor, ...]  # by rank, int64: padding in the last rows of its pieces, in its part of the workspace

    @classmethod
    def of(cls, layout: SignLayout, device: torch.device) -> Tables:
        pieces, span = list(layout.pieces()), layout.span_numel
        none = len(pieces)
        views, numels = list[slice](), [0] * (1 if layout.fused else len(layout.tensors))
        tails = [list[int]() for _ in range(layout.size)]
        piece_of = torch.full((layout.size * span // ROW,), none, dtype=torch.int32)
        by_owner, by_tensor = [list[int]() for _ in range(layout.size)], [list[int]() for _ in numels]
        for index, piece in enumerate(pieces):
            lo, hi = piece.owner * span + piece.lo, piece.owner * span + piece.hi
            views.append(slice(lo, hi))
            tails[piece.owner] += range(piece.hi, round_up(piece.hi, ROW))
            piece_of[lo // ROW : -(-hi // ROW)] = index
            by_owner[piece.owner].append(index)
            by_tensor[piece.tensor].append(index)
            numels[piece.tensor] += hi - lo
        lengths = torch.tensor([view.stop - view.start for view in views], dtype=torch.float32)
        bounds = [0, *itertools.accumulate(map(len, by_owner))]
        return cls(
            tuple(views),
            tuple(map(slice, bounds[:-1], bounds[1:])),
            piece_of.to(device),
            _padded(by_tensor, none).to(device),
            torch.tensor([piece.tensor for piece in pieces], dtype=torch.int64, device=device),
            torch.tensor([max(numel, 1) for numel in numels], dtype=torch.float32).sqrt().to(device),
            lengths.sqrt().to(device),
            _padded(by_owner, none).to(device),
            tuple(torch.tensor(found, dtype=torch.int64, device=device) for found in tails),
        )


def _padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Return ragged rows as a matrix of int64, at least one column wide."""
    width = max([1, *map(len, rows)])
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows] or [[fill]], dtype=torch.int64)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
