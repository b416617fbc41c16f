"""Batches by tokens: as many samples as fit, so short ones are not padded to the length of long ones.

    plan = PackedOrder(lengths=lengths, packing=Packing(max_tokens=4096), replicas=8, accumulation=2, seed=1)
    plan.micro_batches(epoch)   # one tuple of samples per micro-batch, those of a step side by side

One pass over the samples in the chosen order cuts an epoch into micro-batches; every rank computes the whole list, so
nothing is communicated.  Step s of the run takes the next replicas x accumulation of them, and rank r of micro-step m
the one at m * replicas + r.  So all ranks have equally many micro-batches, and another number of ranks reads the same
ones if the global number per step stays.

Tokens exclude padding, which the collate function adds; ordering by length minimizes it, and the steps are then
shuffled, so that a run does not begin with the short samples.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from zengine.data.files.metrics import MetricError


class Picking(enum.Enum):
    """Order in which samples are packed into micro-batches."""

    DATALOADER = "dataloader"  # as the dataset has them
    RANDOM = "random"  # shuffled, anew in each epoch
    SEQLEN = "seqlen"  # by length, and the steps shuffled anew in each epoch


@attrs.frozen(kw_only=True)
class Packing:
    """Limits of a micro-batch."""

    max_tokens: int  # of all its samples together; longer samples are left out
    min_batch_size: int = 1  # samples: a micro-batch of fewer is left out
    max_batch_size: int = 0  # samples at most; 0: as many as fit
    picking: Picking = Picking.DATALOADER

    def __attrs_post_init__(self) -> None:
        if self.max_tokens < 1 or self.min_batch_size < 1 or 0 < self.max_batch_size < self.min_batch_size:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) and min_batch_size ({self.min_batch_size}) must be at least 1, and "
                f"max_batch_size ({self.max_batch_size}; 0 is no limit) at least min_batch_size"
            )

    def bounds(self, lengths: NDArray[Any]) -> list[tuple[int, int]]:
        """Return [begin, end) of each micro-batch over samples of these lengths, all at most max_tokens."""
        ends = np.cumsum(lengths)
        found, begin, before = [], 0, 0
        while begin < len(lengths):
            end = int(np.searchsorted(ends, before + self.max_tokens, side="right"))
            end = min(end, begin + self.max_batch_size) if self.max_batch_size else end
            if end - begin >= self.min_batch_size:
                found.append((begin, end))
            begin, before = end, int(ends[end - 1])
        return found


@attrs.frozen(kw_only=True, eq=False)
class PackedOrder:
    """Micro-batches of every epoch, for all ranks.

    Invariant: an epoch has at least one whole step.
    """

    lengths: NDArray[np.int64]  # (num_samples,): tokens of each sample
    packing: Packing
    replicas: int  # ranks that share the data
    accumulation: int  # micro-steps of a step
    seed: int
    drop_last: bool  # leave out the last micro-batches that make no whole step; else fill up from the first

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_too_long(self) -> int:
        """Number of samples that exceed max_tokens and are dropped."""
        return int((self.lengths > self.packing.max_tokens).sum())

    @property
    def per_step(self) -> int:
        """Micro-batches of a step over all ranks."""
        return self.replicas * self.accumulation

    def micro_batches(self, epoch: int) -> list[tuple[int, ...]]:
        """Return the samples of each micro-batch of `epoch`, for a whole number of steps.

        Raises:
            MetricError: there is not enough for one step.
        """
        order = self._order(epoch)
        found = [tuple(order[begin:end].tolist()) for begin, end in self.packing.bounds(self.lengths[order])]
        num_steps = len(found) // self.per_step if self.drop_last else -(-len(found) // self.per_step)
        if not num_steps:
            raise MetricError(
                f"{self.num_samples} samples make {len(found)} micro-batches ({self.packing}; {self.num_too_long} "
                f"samples are longer than max_tokens), and one step takes {self.per_step}: {self.replicas} replicas "
                f"x {self.accumulation} micro-steps. Lower max_tokens or min_batch_size, or take fewer ranks"
            )
        whole = [found[place % len(found)] for place in range(num_steps * self.per_step)]
        return self._shuffled(whole, epoch) if self.packing.picking is Picking.SEQLEN else whole

    def _order(self, epoch: int) -> NDArray[np.int64]:
        order = np.flatnonzero(self.lengths <= self.packing.max_tokens)
        if self.packing.picking is Picking.SEQLEN:
            order = order[np.argsort(self.lengths[order], kind="stable")]
        if self.packing.picking is Picking.RANDOM:
            order = order[self._ranking(epoch, len(order))]
        return order

    def _shuffled(self, batches: list[tuple[int, ...]], epoch: int) -> list[tuple[int, ...]]:
        """Shuffle the steps; micro-batches of a step stay together, as they are equally long."""
        steps = self._ranking(epoch, len(batches) // self.per_step)
        return [batches[step * self.per_step + place] for step in steps.tolist() for place in range(self.per_step)]

    def _ranking(self, epoch: int, count: int) -> NDArray[np.int64]:
        """Return a permutation of `count` items by (seed, epoch), made as in `order`."""
        keys = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(count)
        return np.argsort(keys, kind="stable")
