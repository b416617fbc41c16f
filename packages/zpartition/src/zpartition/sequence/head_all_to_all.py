"""Head all-to-all: exchange all heads of some tokens for all tokens of some heads.

    to_heads    (..., n, ..., all heads, ...)  ->  (..., size * n, ..., own heads, ...)    before an attention
    to_tokens   (..., size * n, ..., own heads, ...)  ->  (..., n, ..., all heads, ...)    after it

Each is the transpose of the other: heads that went to several ranks are summed on the way back (gradients).  All
tensors of a call travel as one message if they have one dtype and device.  If all ranks send equally much it is an
all-to-all; otherwise an all_to_all_v, whose sizes every rank knows from the ranges.  These functions are not
differentiable; see ulysses.py.

`HeadAssignment` splits query heads into runs, as even as possible: of 6 over 4 ranks 2, 2, 1, 1.  A
rank also gets the key-value heads that its queries attend to, so if there are fewer of those than ranks some go to
several.  If its queries share them unevenly (of 6 queries on 3 key-value heads the first rank of two has 0, 0, 1),
they are repeated for each query after they arrive, and the attention there is a plain one: no repeated heads are
sent.

Rejected: repeating key-value heads before they are sent; assigning whole groups, by which all ranks wait for those
with one group more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import attrs
import torch
from torch import Tensor

import zcomm
from zpartition.layout.model_parallel import ModelParallelGroup

__all__ = ["Dims", "HeadAssignment", "to_heads", "to_tokens"]

Ranges = tuple[range, ...]  # the heads of each rank


@final
@attrs.frozen
class HeadAssignment:
    """Assignment of `num_query` heads, which share `num_key_value` heads evenly, to `size` ranks."""

    num_query: int
    num_key_value: int
    size: int

    def __attrs_post_init__(self) -> None:
        """Raise ValueError if the numbers do not match, or there are too few heads."""
        if self.num_key_value < 1 or self.num_query % self.num_key_value:
            raise ValueError(
                f"{self.num_query} query heads do not share {self.num_key_value} key-value heads evenly: the first "
                "number must be a multiple of the second."
            )
        if self.num_query < self.size:
            raise ValueError(
                f"{self.num_query} query heads cannot be split over {self.size} sequence ranks: each rank needs one. "
                f"Use at most {self.num_query} ranks, or ring_attention, which splits no heads."
            )

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.num_query // self.num_key_value

    def query(self, rank: int) -> range:
        """Query heads of a rank."""
        each, more = divmod(self.num_query, self.size)
        start = rank * each + min(rank, more)
        return range(start, start + each + (rank < more))

    def key_value(self, rank: int) -> range:
        """Key-value heads that the rank's query heads attend to."""
        mine = self.query(rank)
        return range(mine[0] // self.group, mine[-1] // self.group + 1)

    def repeats(self, rank: int) -> tuple[int, ...]:
        """Return the key-value head, counted in `key_value`, of each query head of a rank; () if they share evenly.

        Evenly means as attentions assume it: equally many consecutive queries for each.
        """
        mine, first = self.query(rank), self.key_value(rank)[0]
        wanted = tuple(head // self.group - first for head in mine)
        each = len(mine) // len(self.key_value(rank))
        is_even = wanted == tuple(place // each for place in range(len(mine))) and len(mine) % each == 0
        return () if is_even and len(set(wanted)) * each == len(mine) else wanted

    def queries(self) -> tuple[range, ...]:
        """Query heads of all ranks."""
        return tuple(map(self.query, range(self.size)))

    def key_values(self) -> tuple[range, ...]:
        """Key-value heads of all ranks."""
        return tuple(map(self.key_value, range(self.size)))


@final
@attrs.frozen
class Dims:
    """Dims of heads and tokens in a tensor; counted from the front."""

    heads: int
    tokens: int


def to_heads(
    tensors: Sequence[Tensor], ranges: Sequence[Ranges], dims: Dims, mp_group: ModelParallelGroup
) -> list[Tensor]:
    """Return all tokens of this rank's heads, from all heads of its tokens; `ranges` for each of the tensors.

    tensors: of one dtype, with any dims besides the two of `dims`; `tokens` of them here, `group * tokens` in the
    result.  Collective of the group.  Every rank has equally many tokens.
    """
    pieces = [
        [tensor.narrow(dims.heads, found[to].start, len(found[to])) for tensor, found in zip(tensors, ranges)]
        for to in range(mp_group.size)
    ]
    shapes = [_with_size(tensor, dims.heads, len(found[mp_group.rank])) for tensor, found in zip(tensors, ranges)]
    sent = [[piece.numel() for piece in row] for row in pieces]
    received = _all_to_all(pieces, [shapes] * mp_group.size, [sent] * mp_group.size, mp_group, "tokens to heads")
    return [torch.cat(parts, dims.tokens) for parts in zip(*received)]


def to_tokens(
    tensors: Sequence[Tensor], ranges: Sequence[Ranges], dims: Dims, mp_group: ModelParallelGroup
) -> list[Tensor]:
    """Return all heads of this rank's tokens, from all tokens of its heads; heads that several ranks hold are summed.

    Collective of the group.
    """
    size = mp_group.size
    pieces = [
        [tensor.narrow(dims.tokens, to * n, n) for tensor in tensors for n in [tensor.shape[dims.tokens] // size]]
        for to in range(size)
    ]
    shapes = [
        [_with_size(piece, dims.heads, len(found[source])) for piece, found in zip(pieces[0], ranges)]
        for source in range(size)
    ]
    sent = [[[math.prod(shape) for shape in row]] * size for row in shapes]
    received = _all_to_all(pieces, shapes, sent, mp_group, "heads to tokens")
    return [_join_heads([row[index] for row in received], found, dims.heads) for index, found in enumerate(ranges)]


def _join_heads(parts: Sequence[Tensor], ranges: Ranges, dim: int) -> Tensor:
    """Concatenate the heads in order; sum those of several ranks."""
    if sum(map(len, ranges)) == ranges[-1].stop:
        return torch.cat(list(parts), dim)
    whole = parts[0].new_zeros(_with_size(parts[0], dim, ranges[-1].stop))
    for part, heads in zip(parts, ranges):
        whole.narrow(dim, heads.start, len(heads)).add_(part)
    return whole


def _with_size(tensor: Tensor, dim: int, length: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])


def _all_to_all(
    pieces: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    numels: Sequence[Sequence[Sequence[int]]],
    mp_group: ModelParallelGroup,
    label: str,
) -> list[list[Tensor]]:
    """Send `pieces[r]` to rank r; returns the pieces of each rank, in `shapes`.

    numels: elements of each piece from rank r to rank s, the same table on all ranks.
    """
    kinds = {(piece.dtype, piece.device) for piece in pieces[0]}
    if len(kinds) > 1:  # a message has one dtype
        each = [
            _all_to_all(
                [[row[index]] for row in pieces],
                [[row[index]] for row in shapes],
                [[[to[index]] for to in row] for row in numels],
                mp_group,
                label,
            )
            for index in range(len(pieces[0]))
        ]
        return [[tensors[source][0] for tensors in each] for source in range(mp_group.size)]
    table = [[sum(to) for to in row] for row in numels]
    outgoing = torch.cat([piece.reshape(-1) for row in pieces for piece in row])
    incoming = _send_receive(outgoing, table, mp_group, label)
    received = []
    for row, part in zip(shapes, torch.split(incoming, [row[mp_group.rank] for row in table])):
        parts = torch.split(part, [math.prod(shape) for shape in row])
        received.append([flat.view(shape) for flat, shape in zip(parts, row)])
    return received


def _send_receive(outgoing: Tensor, table: list[list[int]], mp_group: ModelParallelGroup, label: str) -> Tensor:
    if len({numel for row in table for numel in row}) > 1:
        return zcomm.all_to_all_v(outgoing, table, mp_group.group, label=label)
    incoming = torch.empty_like(outgoing)
    zcomm.all_to_all(incoming, outgoing, mp_group.group, label=label)
    return incoming
