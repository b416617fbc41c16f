"""Splits: the tokens of a sequence that each rank holds, and the attention between them.

CONTIGUOUS: rank r has the r-th of `size` equal runs.  ZIGZAG: of 2 * size runs it has number r and number
2 * size - 1 - r, one early and one late.  In causal attention late tokens attend to more keys than early ones; in
zigzag order every rank has equal work in every round of a ring (Brandon et al. 2023 balance it with stripes; with
runs each round is one or two whole rectangles, which fast kernels support).

`attention_slice` returns, as slices, the queries of one rank that attend to the keys of another: at most one
rectangle, or a triangle within a rank.  Arithmetic, without processes.
"""

from __future__ import annotations

import enum
from typing import Any, final

import attrs
import torch
from torch import Tensor

__all__ = ["NO_ATTENTION", "AttentionSlice", "Order", "Split", "attention_slice"]


class Order(enum.Enum):
    """Order in which tokens are split."""

    CONTIGUOUS = "contiguous"  # one run each: the order that Ulysses gathers
    ZIGZAG = "zigzag"  # an early and a late run each: equal work in a causal ring


@final
@attrs.frozen
class AttentionSlice:
    """Queries of one rank that attend to keys of another."""

    query: slice
    key: slice
    is_causal: bool  # each to keys up to its own position; otherwise to all

    def __bool__(self) -> bool:
        """True if it is not empty."""
        return bool(self.query != slice(0, 0))


NO_ATTENTION = AttentionSlice(slice(0, 0), slice(0, 0), False)


def attention_slice(order: Order, rank: int, source: int, num_tokens: int, *, is_causal: bool) -> AttentionSlice:
    """Return the slice of the `num_tokens` queries of `rank` over the keys of `source`."""
    every = slice(0, num_tokens)
    if not is_causal or source == rank:
        return AttentionSlice(every, every, is_causal)
    if order is Order.CONTIGUOUS:
        return AttentionSlice(every, every, False) if source < rank else NO_ATTENTION
    half = num_tokens // 2
    if source < rank:
        return AttentionSlice(every, slice(0, half), False)
    return AttentionSlice(slice(half, num_tokens), every, False)


@final
@attrs.frozen
class Split:
    """The tokens of rank `rank` of `size`."""

    size: int = 1
    rank: int = 0
    order: Order = Order.CONTIGUOUS

    @property
    def multiple(self) -> int:
        """Divisor that the number of tokens must have."""
        return self.size * (2 if self.order is Order.ZIGZAG else 1)

    def check(self, length: int, what: str) -> None:
        """Raise ValueError, with the numbers, if `length` tokens cannot be split evenly."""
        if length % self.multiple:
            more = -length % self.multiple
            raise ValueError(
                f"{what}: {length} tokens cannot be split over {self.size} sequence ranks ({self.order.value}), "
                f"which needs a multiple of {self.multiple}: pad by {more} to {length + more}, with labels of "
                f"ignore_index, or cut to {length // self.multiple * self.multiple}."
            )

    def runs(self, length: int, rank: int) -> tuple[range, ...]:
        """Return the positions of a rank's tokens in a sequence of `length`."""
        if self.order is Order.CONTIGUOUS:
            each = length // self.size
            return (range(rank * each, (rank + 1) * each),)
        each, late = length // (2 * self.size), 2 * self.size - 1 - rank
        return range(rank * each, (rank + 1) * each), range(late * each, (late + 1) * each)

    def positions(self, length: int) -> Tensor:
        """(length / size,) int64: positions of this rank's tokens in the sequence."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.runs(length, self.rank)])

    def take(self, x: Tensor, dim: int = 1, what: str = "a sequence") -> Tensor:
        """Return this rank's tokens of a tensor (or any object with `narrow`).  Raises ValueError as `check`."""
        self.check(x.shape[dim], what)
        runs = self.runs(x.shape[dim], self.rank)
        parts = [x.narrow(dim, run.start, len(run)) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: list[Tensor], dim: int = 1) -> Tensor:
        """Rebuild the whole sequence from all ranks' tokens in rank order."""
        length = sum(part.shape[dim] for part in parts)
        pieces: dict[int, Any] = {}
        for rank, part in enumerate(parts):
            runs = self.runs(length, rank)
            for run, piece in zip(runs, torch.split(part, [len(run) for run in runs], dim)):
                pieces[run.start] = piece
        return torch.cat([pieces[start] for start in sorted(pieces)], dim)
