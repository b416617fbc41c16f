"""Bucket exchange: compressed communication of an optimizer whose gradients are not reduced.

1-bit Adam and its relatives average momenta instead of gradients (zoptim's `Exchange`, which this class implements).
The whole of a shard is its bucket: at stage 0 the shard itself, at stage 1 the bucket of which this rank owns a span.
Spans of buckets are the chunks of the compressed all-reduce, so the owner of a span is its server at both stages,
and both compute the same bits.

Memory on a rank (estimate/compression.py), elements in float32: errors take N + N / ranks.  At stage 1 a step also
makes the whole momentum, N, for as long as it runs; between steps the last message, N / 8 bytes, holds it.  The
weights are all-gathered in their own dtype as ever, so at stage 1 only the gradients' share of the traffic shrinks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import final

import attrs
import torch
from torch import Tensor

import zcomm
from zpartition.core import PartitionState
from zpartition.layout.layout import Bucket

__all__ = ["ERRORS", "LATEST", "BucketExchange", "sign_layout"]

ERRORS, LATEST = "compression errors", "compressed momenta"  # owners of memory
_LABEL = LATEST  # in the communication log


@attrs.frozen
class BucketPlace:
    """Position of a parameter in its bucket."""

    name: str
    start: int
    shape: tuple[int, ...]


@final
class BucketExchange:
    """Communication of the shards of `partition`, whose optimizer has been rebound."""

    def __init__(self, partition: PartitionState) -> None:
        """Keep the partition; errors are allocated by `connect`."""
        self._partition = partition
        self._buckets: dict[Tensor, Bucket] = {
            holder.tensor: storage.bucket for holder, storage in zip(partition.holders, partition.storages)
        }
        self._reduce = zcomm.CompressedAllReduce(zcomm.SignLayout((), self.world_size, ()), partition.group)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._partition.layout.world_size

    def connect(self, exact: Sequence[Tensor], compressed: Sequence[Tensor], *, fused: bool = False) -> None:
        """Allocate errors for the buckets of `compressed` shards.  fused: all tensors share one scale."""
        layout = sign_layout([self._buckets[shard] for shard in compressed], self.world_size, fused=fused)
        self._reduce = zcomm.CompressedAllReduce(
            layout, self._partition.group, device=self._partition.device, label=_LABEL
        )

    def places(self, shard: Tensor) -> list[BucketPlace]:
        """Return the parameters in the bucket of a shard."""
        return [BucketPlace(slot.name, slot.offset, slot.shape) for slot in self._buckets[shard].slots]

    def gradients(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's own gradients by bucket, (numel,) each; see `Partition.reduce_gradients`."""
        found = self._partition.own_gradients()
        return [found[self._buckets[shard].index] for shard in shards]

    def wholes(self, shards: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        """Return buckets of which each rank has a span; a collective for each if they are sharded."""
        return [self._whole(self._buckets[shard], part) for shard, part in zip(shards, parts)]

    def latest(self, shards: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the result of the last `mean` if buckets are sharded and there is one.

        After an update without some parameters, whose momenta stayed as they were, spans have to be gathered.
        """
        partition = self._partition
        if partition.layout.num_shards == 1 or partition.unused or not self._reduce.latest.numel():
            return None
        device = self._partition.device
        buffers = [torch.empty(self._buckets[shard].numel, device=device) for shard in shards]
        self._reduce.decode_latest(buffers)
        return buffers

    def mean(self, wholes: Sequence[Tensor]) -> None:
        """Replace all compressed buckets by their mean, in one message a phase."""
        self._reduce.mean_buffers(wholes)

    def exact_mean(self, wholes: Sequence[Tensor]) -> None:
        """Replace tensors by their mean."""
        for whole in wholes:
            zcomm.all_reduce(whole, self._partition.group, label="exact means")
            whole.div_(self.world_size)

    def own(self, shard: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's span."""
        return whole.view(-1)[slice(*self._buckets[shard].span(self._partition.rank))]

    def span(self, shard: Tensor) -> tuple[int, int]:
        """Return [lo, hi) of the bucket that this rank owns."""
        return self._buckets[shard].span(self._partition.rank)

    def total(self, numbers: Tensor) -> Tensor:
        """Return sums over the spans."""
        return self._over_spans(numbers, "sum")

    def total_of_model(self, number: Tensor) -> Tensor:
        """Return the sum over the spans and the stages of a pipeline."""
        found = self.total(number).to(self._partition.device)
        self._partition.pipeline_stages.all_reduce(found)
        return found

    def largest(self, numbers: Tensor) -> Tensor:
        """Return maxima over the spans."""
        return self._over_spans(numbers, "max")

    def _over_spans(self, numbers: Tensor, op: str) -> Tensor:
        if self._partition.layout.num_shards == 1:
            return numbers
        found = numbers.to(self._partition.device)
        zcomm.all_reduce(found, self._partition.group, op=op, label=f"{op} over spans")
        return found.to(numbers.device)

    def rank_tensors(self) -> Mapping[str, Tensor]:
        """Return the errors; names tell the layout, to which they belong."""
        if self.world_size == 1:
            return {}
        digest = zlib.crc32(repr(self._reduce.layout).encode())
        return {
            f"worker_error.{digest:08x}": self._reduce.worker_error,
            f"server_error.{digest:08x}": self._reduce.server_error,
        }

    def ledger(self) -> Mapping[str, int]:
        """Return the bytes of errors and of the last message on this rank, by owner."""
        reduce = self._reduce
        return {ERRORS: reduce.worker_error.nbytes + reduce.server_error.nbytes, LATEST: reduce.latest.nbytes}

    def reset(self) -> None:
        """Forget the errors and the last message."""
        self._reduce.reset()

    def _whole(self, bucket: Bucket, part: Tensor) -> Tensor:
        if bucket.num_shards == 1:
            return part.view(-1)
        whole = part.new_empty(bucket.numel)
        zcomm.all_gather(whole, part.detach().contiguous().view(-1), self._partition.group, label="whole moments")
        return whole


def sign_layout(buckets: Sequence[Bucket], num_ranks: int, *, fused: bool) -> zcomm.SignLayout:
    """Return the positions of parameters in a message of these buckets."""
    parts = [(each.numel, [(slot.offset, slot.end) for slot in each.slots]) for each in buckets]
    return zcomm.SignLayout.of_buffers(parts, num_ranks, fused=fused)
