"""Sample order: pure arithmetic, no state, no processes.

An epoch is a permutation of all samples that depends on (seed, epoch) only, never on the number of ranks.  Its
position counts the samples of all ranks.  A micro-batch of the world is the next world_size * micro_batch_size
samples, and rank r takes the r-th slice.  So a run may stop anywhere and resume with other ranks or another
micro-batch size: the position means the same sample everywhere, and the rest of the epoch is sliced anew from there.

The permutation sorts the samples by random keys from numpy's Philox, keyed by exactly (seed, epoch).  Rejected: a
generator's `permutation`, and torch.randperm, whose algorithms may change between releases; the raw stream of a named
bit generator may not.  Ties between 64-bit keys keep the order of the samples.  The sort costs about two seconds for
ten million samples, once per epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@attrs.frozen(kw_only=True)
class BatchIndices:
    """Samples of one micro-batch of one rank, and what seeds their random draws."""

    epoch: int
    begin: int  # position of the first sample in the epoch; differs between ranks
    indices: tuple[int, ...]  # samples of the dataset, micro_batch_size of them


def _at_least(low: int) -> Any:
    def check(instance: object, attribute: Any, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{attribute.name} must be an integer >= {low}, got {value!r}")

    return check


@attrs.frozen(kw_only=True)
class Order:
    """Order of samples for every rank of one world.

    Invariant: at least one whole micro-batch of the world fits into the dataset.

    Raises ValueError otherwise, and for a seed of 2**64 or more.
    """

    num_samples: int = attrs.field(validator=_at_least(0))  # in the dataset
    micro_batch_size: int = attrs.field(validator=_at_least(1))  # samples of one rank in a micro-step
    world_size: int = attrs.field(default=1, validator=_at_least(1))  # ranks that share the data
    seed: int = attrs.field(default=0, validator=_at_least(0))
    shuffle: bool = True  # False: every epoch is 0, 1, 2, ...

    def __attrs_post_init__(self) -> None:
        if self.seed >= 2**64:
            raise ValueError(f"seed must be below 2**64, got {self.seed}")
        if self.num_samples < self.stride:
            raise ValueError(
                f"the dataset has {self.num_samples} samples, fewer than one micro-batch of all ranks: "
                f"micro_batch_size {self.micro_batch_size} x {self.world_size} ranks = {self.stride}. "
                "Use a smaller micro-batch, fewer ranks or more data"
            )

    @property
    def stride(self) -> int:
        """Samples of all ranks in one micro-step."""
        return self.micro_batch_size * self.world_size

    def permutation(self, epoch: int) -> Indices:
        """Return (num_samples,) int64: the samples in the order of `epoch`, equal at any rank and world size."""
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        keys = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(self.num_samples)
        return np.argsort(keys, kind="stable").astype(np.int64, copy=False)

    def num_batches(self, *, drop_last: bool, consumed: int = 0) -> int:
        """Return the micro-steps left in an epoch after `consumed` samples.

        A remainder smaller than a stride is dropped (drop_last) or makes one more micro-step, padded from the start
        of the same permutation, so that all ranks have equally many batches of equal size.
        """
        left = self.num_samples - consumed
        return left // self.stride if drop_last else -(-left // self.stride)

    def batches(self, rank: int, *, epoch: int, consumed: int, drop_last: bool) -> Iterator[BatchIndices]:
        """Yield the micro-batches of `rank` in the rest of `epoch` after `consumed` samples."""
        order = self.permutation(epoch)
        for batch in range(self.num_batches(drop_last=drop_last, consumed=consumed)):
            begin = consumed + batch * self.stride + rank * self.micro_batch_size
            places = np.arange(begin, begin + self.micro_batch_size) % self.num_samples
            yield BatchIndices(epoch=epoch, begin=begin, indices=tuple(order[places].tolist()))
