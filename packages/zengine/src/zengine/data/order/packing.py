"""Packing into batches by tokens: as many samples as fit, so that short ones are not padded to long ones.

    order = PackedOrder(lengths=lengths, packing=Packing(max_tokens=4096), replicas=8, accumulation=2, seed=1)
    order.micro_batches(epoch)   # one tuple of samples per micro-batch; a step's micro-batches are adjacent

One pass over the samples in the chosen order cuts an epoch into micro-batches; every rank computes the whole list, so
nothing is communicated.  Step s of the run takes the next replicas x accumulation of them, and rank r of micro-step m
the one at m * replicas + r.  So all ranks have equally many micro-batches, and another world size reads the
same ones if the number per step stays.

Token counts exclude padding, which the collate function adds.  Ordering by length minimizes padding; the steps are
then shuffled, so that a run does not begin with the short samples.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from zengine.data.metrics import MetricError


class PickingOrder(enum.Enum):
    """Order in which samples are packed into micro-batches."""

    DATALOADER = "dataloader"  # in the order of the dataset
    RANDOM = "random"  # reshuffled each epoch
    SEQLEN = "seqlen"  # by length; the steps are reshuffled each epoch


@attrs.frozen(kw_only=True)
class Packing:
    """Limits of a micro-batch.  Raises ValueError for limits below 1 or in the wrong order."""

    max_tokens: int  # of all samples of a micro-batch; longer samples are dropped
    min_batch_size: int = 1  # samples; a smaller micro-batch is dropped
    max_batch_size: int = 0  # samples at most; 0: as many as fit
    picking: PickingOrder = PickingOrder.DATALOADER

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
    drop_last: bool  # drop the last micro-batches that make no whole step; otherwise pad from the first

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
            MetricError: the dataset is too small for one step.
        """
        order = self._order(epoch)
        found = [tuple(order[begin:end].tolist()) for begin, end in self.packing.bounds(self.lengths[order])]
        num_steps = len(found) // self.per_step if self.drop_last else -(-len(found) // self.per_step)
        if not num_steps:
            raise MetricError(
                f"{self.num_samples} samples make {len(found)} micro-batches ({self.packing}; {self.num_too_long} "
                f"samples exceed max_tokens), but one step needs {self.per_step}: {self.replicas} replicas "
                f"x {self.accumulation} micro-steps. Lower max_tokens or min_batch_size, or use fewer ranks"
            )
        whole = [found[place % len(found)] for place in range(num_steps * self.per_step)]
        return self._shuffled(whole, epoch) if self.packing.picking is PickingOrder.SEQLEN else whole

    def _order(self, epoch: int) -> NDArray[np.int64]:
        order = np.flatnonzero(self.lengths <= self.packing.max_tokens)
        if self.packing.picking is PickingOrder.SEQLEN:
            order = order[np.argsort(self.lengths[order], kind="stable")]
        if self.packing.picking is PickingOrder.RANDOM:
            order = order[self._ranking(epoch, len(order))]
        return order

    def _shuffled(self, batches: list[tuple[int, ...]], epoch: int) -> list[tuple[int, ...]]:
        """Shuffle the steps; micro-batches of one step stay together, since their lengths are similar."""
        steps = self._ranking(epoch, len(batches) // self.per_step)
        return [batches[step * self.per_step + place] for step in steps.tolist() for place in range(self.per_step)]

    def _ranking(self, epoch: int, count: int) -> NDArray[np.int64]:
        """Return a permutation of `count` items from (seed, epoch), as `Order.permutation` does."""
        keys = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(count)
        return np.argsort(keys, kind="stable")
