"""What a training step may ask about its gradients, and about those that other backwards have left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

import zcomm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from zpartition.cells import Cell
    from zpartition.layout import Bucket, Layout
    from zpartition.lookout import Lookout
    from zpartition.reducer import GradientReducer
    from zpartition.sharded import ShardedStorage
    from zpartition.storage import BucketStorage


class GradientFacts:
    """Counts, statistics and names of gradients; mixed into `Partition`."""

    if TYPE_CHECKING:
        module: nn.Module
        cell: Cell
        stages: Cell
        layout: Layout
        reducer: GradientReducer
        storages: tuple[BucketStorage | ShardedStorage, ...]

        @property
        def rank(self) -> int: ...
        @property
        def device(self) -> torch.device: ...
        @property
        def group(self) -> ProcessGroup | None: ...

    def num_unused(self) -> int:
        """Partitioned parameters that got no gradient on this rank since `zero_grad`."""
        return sum(len(g.params) - len(g.seen) for g in self.reducer.gradients)

    def num_arrived(self) -> int:
        """Gradients that the backward in progress (or the last one) has produced on this rank."""
        return self.reducer.num_arrived

    def has_plain_gradients(self) -> bool:
        """Whether a backward outside of `micro_step` has left gradients in the parameters of this rank."""
        return any(g.has_plain(i) for g in self.reducer.gradients for i in range(len(g.params)))

    def drop_plain_gradients(self) -> None:
        """Forget those, and gradients of what is not partitioned; what micro-steps have brought stays."""
        owned = {id(param) for gradient in self.reducer.gradients for param in gradient.params}
        for gradient in self.reducer.gradients:
            gradient.drop_plain()
        for param in self.module.parameters():
            if id(param) not in owned:
                param.grad = None

    def sum_over_shards(self, vector: torch.Tensor, *, num_of_model: int = 1) -> None:
        """All-reduce (sum) of statistics whose first element is a sum over the kept gradients.

        Where several ranks keep the same gradients, the first element of one of them counts.  It is summed over
        cells and stages too (cells.py), as are all of the first `num_of_model`; the rest, which is the same in all of
        them, is not.
        """
        if self.rank >= self.layout.num_shards and not self.layout.is_dealt:
            vector[0] = 0.0
        reduced = vector.to(self.device)  # gradients may be on the host, whose tensors a group may not take
        zcomm.all_reduce(reduced, self.group, label="gradient statistics")
        self.cell.add_up(reduced[:num_of_model])
        self.stages.add_up(reduced[:num_of_model])
        if reduced is not vector:
            vector.copy_(reduced)

    def counts(self, bucket: Bucket) -> bool:
        """Whether this rank's gradient of `bucket` is one that a sum over all is to see; see `sum_over_shards`."""
        is_first = not self.layout.is_dealt or self.rank // bucket.deal < bucket.num_shards
        return bucket.copy == 0 and is_first

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter, this rank's flat part of its reduced gradient); valid after `finish_gradients`."""
        for storage, gradient in zip(self.storages, self.reducer.gradients):
            if gradient.kept is not None:
                for piece in storage.pieces(self.rank):
                    yield piece.slot.name, gradient.kept[piece.offset : piece.offset + piece.numel]

    @property
    def lookout(self) -> Lookout:
        """Tells whether gradients of this rank were finite before they were sent, once it is on."""
        return self.reducer.lookout
