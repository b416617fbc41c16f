"""Selective updates (ZenFlow, Lan et al. 2025): the policy, and its law as pure functions.

With states on the host every step waits for the host.  But a few columns of each matrix have most of the gradient.
So these *columns* are updated on the device in every step, and the *rest* of a matrix once in an interval of steps,
on the host, with the mean of the interval's gradients; the device need not wait for that update.  Vectors and scalars
count as columns.

    step i (from 0, applied steps only), gradient g, divisor d (loss scale, clipping)     h = g / d
    i < warm_up            w, m, v <- adam(h) everywhere, on the host
    selects(i)             columns <- the top-k of sum |h| over each column; nothing is pending then (a checkpoint of
                           other intervals may bring some: it updates the rest first)
    columns                w, m, v <- adam(h), count t <- t + 1
    rest                   p <- p + h;  at the end of an interval of s steps:
                           w, m, v <- adam(p / s), count n <- n + 1, p <- 0
    overlap                the module shows the rest's new weights at the next end of an interval, or before the next
                           selection; without it, at once

Every element has one pair of moments.  A column that changes sides keeps their unbiased values: t and n differ, so
its moments are multiplied by (1 - beta^to) / (1 - beta^from).  With intervals of one step, t = n and nothing changes:
the result is AdamW's.

A parameter that no rank has used in a step has the gradient 0 there: its moments fade, and its decay goes on.

Rejected: moments that begin at zero after each selection while the count goes on (DeepSpeed), which makes the next
update up to sqrt(1 / (1 - beta2)) times as large; selection within each rank's part, which depends on the world.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import attrs
import torch
from attrs.validators import and_, ge, instance_of, le
from torch import Tensor

from zpartition.layout.layout import Piece

__all__ = [
    "EVERY_ELEMENT",
    "ColumnMoments",
    "SelectivePolicy",
    "carried",
    "is_matrix",
    "most_important",
    "most_selected",
    "num_columns",
    "num_ripe",
]


class ColumnMoments(enum.Enum):
    """Place of the columns' moments between steps."""

    DEVICE = "device"  # two elements for each of the columns
    HOST = "host"  # those of one bucket while it is updated; copied twice a step


@attrs.frozen(kw_only=True)
class SelectivePolicy:
    """When columns are selected, and when the rest is updated.

    Raises:
        ValueError: an interval does not fit between two selections.
    """

    topk_ratio: float = attrs.field(default=0.0, validator=and_(ge(0.0), le(1.0)))  # of the columns; 0: off
    select_every: int = attrs.field(default=0, validator=ge(0))  # steps between selections; 0: the first one only
    update_every: int = attrs.field(default=0, validator=ge(0))  # steps of an interval; 0: until the rest is ripe
    ripe_share: float = attrs.field(default=0.99, validator=and_(ge(0.0), le(1.0)))  # of the matrices; see `num_ripe`
    warm_up: int = attrs.field(default=0, validator=ge(0))  # first steps, which update everything
    overlap: bool = attrs.field(default=False, validator=instance_of(bool))  # update the rest in a thread
    moments: ColumnMoments = ColumnMoments.DEVICE
    reserved_share: float = attrs.field(default=0.5, validator=and_(ge(0.0), le(1.0)))  # of the cores: not its own

    def __attrs_post_init__(self) -> None:
        if 0 < self.select_every < self.update_every:
            raise ValueError(
                f"SelectivePolicy(select_every={self.select_every}, update_every={self.update_every}): a selection "
                "ends the interval, so longer ones never occur. Select at most once in an interval."
            )

    @property
    def has_host_moments(self) -> bool:
        """True if the moments of columns leave the device between steps."""
        return self.moments is ColumnMoments.HOST

    @property
    def is_on(self) -> bool:
        """True if there is a selection."""
        return self.topk_ratio > 0

    def selects(self, step: int) -> bool:
        """Return whether columns are selected in applied step `step` (from 0)."""
        again = self.select_every > 0 and step > self.warm_up and step % self.select_every == 0
        return step == self.warm_up or again

    def ends_interval(self, step: int) -> bool:
        """Return whether the rest is updated in applied step `step`, as far as the policy knows."""
        is_full = self.update_every > 0 and (step + 1 - self.warm_up) % self.update_every == 0
        return is_full or self.selects(step + 1)

    def num_threads(self, num_cores: int) -> int:
        """Return the threads of an update beside the training; 0: as many as torch uses."""
        left = num_cores - -int(-self.reserved_share * num_cores // 1)
        return left if 0 < left < num_cores else 0


EVERY_ELEMENT = SelectivePolicy()


def is_matrix(shape: Sequence[int]) -> bool:
    """Return whether a parameter has columns: two dimensions or more, of which all but the first are one."""
    return len(shape) > 1 and torch.Size(shape).numel() > 0


def num_columns(shape: Sequence[int]) -> int:
    """Return the number of columns of a matrix."""
    return torch.Size(shape[1:]).numel()


def most_important(sums: Tensor, ratio: float) -> Tensor:
    """Return the indices of the columns with the largest `sums`, (columns,), in ascending order.

    `ratio` of the columns, rounded down, and at least one; of equal columns the first.
    """
    count = max(1, int(sums.numel() * ratio))
    return torch.sort(sums, descending=True, stable=True).indices[:count].sort().values


def most_selected(pieces: Iterable[Piece], ratio: float) -> int:
    """Return the largest number of elements of a shard that a selection can have."""
    found = 0
    for piece in pieces:
        if not is_matrix(piece.slot.shape):
            found += piece.numel
            continue
        width = num_columns(piece.slot.shape)
        rows = -(-piece.span[1] // width) - piece.span[0] // width
        found += min(piece.numel, rows * max(1, int(width * ratio)))
    return found


def carried(beta: float, before: int, after: int) -> float:
    """Return the factor of a moment whose number of updates is called `after` instead of `before` from now on."""
    if before == after or not before:
        return 1.0
    return float((1.0 - beta**after) / (1.0 - beta**before))


def num_ripe(columns: Tensor, rest: Tensor) -> int:
    """Return the number of matrices whose rest has piled up as much as a column gets in one step.

    columns: (matrices,) mean of |h| over the elements of the columns and the steps of the interval.
    rest: (matrices,) mean of |h| over the elements of the rest, summed over these steps; infinite without a rest.
    """
    return int((rest >= columns).sum())
