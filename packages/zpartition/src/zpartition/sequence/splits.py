"""Which tokens of a sequence each rank has, and which of them see which.

CONTIGUOUS: rank r has the r-th of `size` equal runs.  ZIGZAG: of 2 * size runs it has number r and number
2 * size - 1 - r, one early and one late.  In a causal attention late tokens have more to look at than early ones;
with the second order every rank has equally much work in every round of a ring (Brandon et al. 2023 balance it with
stripes; runs let each round be one or two whole rectangles, which fast kernels know).

`visit` says what of a rank's queries looks at what of another's keys, as slices: at most one rectangle, and where the
two ranks are one a triangle.  Arithmetic, without processes.
"""

from __future__ import annotations

import enum
from typing import Any, final

import attrs
import torch
from torch import Tensor

__all__ = ["NO_VISIT", "Order", "Split", "Visit", "visit"]


class Order(enum.Enum):
    """How tokens are shared out."""

    CONTIGUOUS = "contiguous"  # one run each: what Ulysses gathers in order
    ZIGZAG = "zigzag"  # an early and a late run each: equal work in a causal ring


@final
@attrs.frozen
class Visit:
    """Queries (of those that a rank has) that look at keys (of those that another has)."""

    query: slice
    key: slice
    is_causal: bool  # each at those not behind it; otherwise at all

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.query != slice(0, 0))


NO_VISIT = Visit(slice(0, 0), slice(0, 0), False)


def visit(order: Order, rank: int, source: int, num_tokens: int, *, is_causal: bool) -> Visit:
    """What of the `num_tokens` queries of `rank` looks at what of the keys of `source`."""
    every = slice(0, num_tokens)
    if not is_causal or source == rank:
        return Visit(every, every, is_causal)
    if order is Order.CONTIGUOUS:
        return Visit(every, every, False) if source < rank else NO_VISIT
    half = num_tokens // 2
    if source < rank:
        return Visit(every, slice(0, half), False)
    return Visit(slice(half, num_tokens), every, False)


@final
@attrs.frozen
class Split:
    """The tokens of rank `rank` of `size`."""

    size: int = 1
    rank: int = 0
    order: Order = Order.CONTIGUOUS

    @property
    def multiple(self) -> int:
        """What the number of tokens has to be a multiple of."""
        return self.size * (2 if self.order is Order.ZIGZAG else 1)

    def check(self, length: int, what: str) -> None:
        """Raise ValueError, with the numbers, if `length` tokens cannot be shared out evenly."""
        if length % self.multiple:
            more = -length % self.multiple
            raise ValueError(
                f"{what}: {length} tokens cannot be shared out over {self.size} sequence ranks ({self.order.value}), "
                f"which needs a multiple of {self.multiple}: pad by {more} to {length + more}, with labels of "
                f"ignore_index, or cut to {length // self.multiple * self.multiple}."
            )

    def runs(self, length: int, rank: int) -> tuple[range, ...]:
        """The positions of a rank's tokens in a sequence of `length`."""
        if self.order is Order.CONTIGUOUS:
            each = length // self.size
            return (range(rank * each, (rank + 1) * each),)
        each, late = length // (2 * self.size), 2 * self.size - 1 - rank
        return range(rank * each, (rank + 1) * each), range(late * each, (late + 1) * each)

    def positions(self, length: int) -> Tensor:
        """(length / size,) int64: where this rank's tokens are in the sequence."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.runs(length, self.rank)])

    def take(self, x: Tensor, dim: int = 1, what: str = "a sequence") -> Tensor:
        """This rank's tokens of a tensor (or anything that is narrowed like one).  Raises ValueError as `check`."""
        self.check(x.shape[dim], what)
        runs = self.runs(x.shape[dim], self.rank)
        parts = [x.narrow(dim, run.start, len(run)) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: list[Tensor], dim: int = 1) -> Tensor:
        """The whole sequence, from all ranks' tokens in the order of the ranks."""
        length = sum(part.shape[dim] for part in parts)
        pieces: dict[int, Any] = {}
        for rank, part in enumerate(parts):
            runs = self.runs(length, rank)
            for run, piece in zip(runs, torch.split(part, [len(run) for run in runs], dim)):
                pieces[run.start] = piece
        return torch.cat([pieces[start] for start in sorted(pieces)], dim)
