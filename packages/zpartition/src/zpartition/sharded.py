"""Weights that rest as shards: one bucket of a unit at stage 3.

What lives for ever is this rank's span.  The whole bucket exists while a module needs it, in a buffer from a pool
that all units share; the module's parameters are views of that buffer then, and *hollow* otherwise: tensors of the
right shape, dtype and device that are one NaN, repeated by strides of 0.  Whoever reads one by mistake sees NaN, and
torch refuses to write into one; a placeholder of shape (0,), or one that reads as zeros, would be wrong in silence.

Rejected: resizing the storage under the views to nothing (FSDP's way).  A CPU kernel that reads such a tensor crashes
the process; and filling it again maps fresh pages, which takes three times as long as the copy itself.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import final

import attrs
import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition.buffers import BufferPool, flat_zeros
from zpartition.homes import IN_PLACE, Home, same_bits, take_edits
from zpartition.layout import Bucket, Piece, Slot
from zpartition.offload import Tier
from zpartition.policy import ZeroPolicy
from zpartition.ranks import Ranks
from zpartition.shelves import OnDevice, Shelf
from zpartition.sources import SHARDS, Source, source_for
from zpartition.storage import BucketStorage

__all__ = ["Presence", "ShardedStorage", "make_storage"]


class Presence(enum.Enum):
    """Where the weights of a bucket are, and who pays."""

    RESTING = "resting"  # the span alone
    COMING = "coming"  # a buffer of bucket.numel beside it, which a collective fills
    PRESENT = "present"  # the same, and the parameters are views of it


@final
@attrs.define(eq=False)
class ShardedStorage:
    """The weights of one bucket on one rank, gathered on demand.

    Invariants: `full is None` exactly when RESTING; the parameters are views of `full` exactly when PRESENT.
    """

    bucket: Bucket
    params: tuple[Parameter, ...]  # in slot order
    span: tuple[int, int]  # of this rank
    shelf: Shelf  # (span numel,) parameter dtype, the truth that other ranks gather, and where it rests
    master: Parameter  # (span numel,) master dtype: `own_span` itself, or memory of its own
    hollow: tuple[torch.Tensor, ...]  # what the parameters are while resting, in slot order
    is_trained: bool = True  # whether an optimizer updates it
    source: Source = SHARDS  # what gathers read in place of `own_span`
    home: Home = IN_PLACE  # of master and states
    presence: Presence = Presence.RESTING
    full: torch.Tensor | None = None  # pool buffer of at least bucket.numel elements
    handle: zcomm.Handle = zcomm.DONE

    @classmethod
    def create(
        cls,
        bucket: Bucket,
        params: tuple[Parameter, ...],
        policy: ZeroPolicy,
        ranks: Ranks,
        is_trained: bool = True,
    ) -> ShardedStorage:
        """Memory for the span of `params`, which keep theirs until `take` or `take_from`."""
        group, (lo, hi) = ranks.having(bucket).shard, bucket.span(ranks.rank)
        own = flat_zeros(hi - lo, bucket.dtype, params[0].device, group)
        master = Parameter(own.to(policy.master_for(bucket.dtype)) if is_trained else own, requires_grad=is_trained)
        poison = torch.full((), torch.nan, dtype=bucket.dtype, device=own.device)
        hollow = tuple(poison.expand(slot.shape) for slot in bucket.slots)
        source = source_for(bucket, policy.of(bucket), group, own.device, is_trained=is_trained)
        return cls(bucket, params, (lo, hi), OnDevice(own), master, hollow, is_trained, source)

    @property
    def own_span(self) -> torch.Tensor:
        """(span numel,) on the device: the truth that other ranks gather, until it is put back on its shelf."""
        return self.shelf.take()

    def take(self, world: ProcessGroup | None) -> None:
        """Cut the parameters into spans, rank 0's values counting; the memory that they had is theirs no more."""
        full = torch.zeros(self.bucket.numel, dtype=self.bucket.dtype, device=self.hollow[0].device)
        for slot, param in zip(self.bucket.slots, self.params):
            full[slot.offset : slot.end].view(slot.shape).copy_(param.data)
        zcomm.broadcast(full, world, source=0, label=f"weights of unit {self.bucket.unit!r}")
        self.own_span.copy_(full[self.span[0] : self.span[1]])
        self.shelf.put()
        self.refresh_master()
        self._point(self.hollow)

    def take_from(self, slot: Slot, values: torch.Tensor) -> None:
        """Take this rank's part of one parameter's `values`."""
        self._point(self.hollow)
        start, stop = max(self.span[0], slot.offset), min(self.span[1], slot.end)
        if start < stop:
            part = values.reshape(-1)[start - slot.offset : stop - slot.offset]
            self.own_span[start - self.span[0] : stop - self.span[0]].copy_(part)
            self.shelf.put()

    def refresh_master(self) -> None:
        """Let the master follow the span."""
        self.home.refresh(self.master, self.own_span)
        self.shelf.drop()

    @classmethod
    def of(
        cls,
        bucket: Bucket,
        params: Mapping[str, Parameter],
        policy: ZeroPolicy,
        ranks: Ranks,
        is_trained: bool = True,
    ) -> ShardedStorage:
        """`create`, with the parameters by name."""
        return cls.create(bucket, tuple(params[slot.name] for slot in bucket.slots), policy, ranks, is_trained)

    @property
    def resting_bytes(self) -> int:
        """What the weights cost between steps, on the device."""
        return self.shelf.num_bytes if self.shelf.tier is Tier.DEVICE else 0

    @property
    def shares_master(self) -> bool:
        """Whether the optimizer updates the shard that is gathered."""
        return self.shelf.tier is Tier.DEVICE and self.master.data_ptr() == self.own_span.data_ptr()

    @property
    def shows_truth(self) -> bool:
        """Whether modules see the spans as they are, straight from their owners."""
        return self.source is SHARDS

    def gather(self, pool: BufferPool, group: ProcessGroup | None, *, exact: bool = False) -> None:
        """RESTING -> COMING: collect the weights into a buffer, as modules see them or (`exact`) the truth of all
        spans; `arrive` waits for it.
        """
        assert self.presence is Presence.RESTING
        own = self.own_span  # may have to be read, which may fail: then nothing has begun
        self.full = pool.obtain(self.bucket.numel, self.bucket.dtype)
        whole, label = self.full[: self.bucket.numel], f"weights of unit {self.bucket.unit!r}"
        source = SHARDS if exact else self.source
        self.handle = source.gather(whole, own, group, pool, label)
        self.presence = Presence.COMING

    def begin_reading(self) -> None:
        """It will be gathered soon."""
        if self.presence is Presence.RESTING:
            self.shelf.begin()

    def arrive(self) -> None:
        """COMING -> PRESENT: wait, and let the parameters show the weights."""
        assert self.presence is Presence.COMING
        assert self.full is not None
        self.handle.wait()
        self.handle = zcomm.DONE
        self.shelf.drop()
        self._point(_views(self.bucket, self.full))
        self.presence = Presence.PRESENT

    def release(self, pool: BufferPool) -> None:
        """Back to RESTING from anywhere; what was written into the parameters is lost unless `absorb` took it."""
        if self.presence is Presence.COMING:
            self.handle.wait()
            self.handle = zcomm.DONE
            self.shelf.drop()
        if self.full is not None:
            self._point(self.hollow)
            pool.recover(self.full)
            self.full = None
        self.presence = Presence.RESTING

    def absorb(self) -> None:
        """Take what the PRESENT parameters show as the truth: this rank's span of it, and its master."""
        assert self.full is not None
        self.own_span.copy_(self.full[self.span[0] : self.span[1]])
        self.shelf.put()
        self.source.stale()
        self.refresh_master()

    def absorb_edits(self) -> None:
        """`absorb`, where what shows the old weight keeps its master as it was."""
        assert self.full is not None
        fresh = self.full[self.span[0] : self.span[1]]
        unchanged = same_bits(fresh, self.own_span)
        self.source.stale()  # whatever this rank's part is: all ranks have to gather the same way next
        if not bool(unchanged.all()):
            shares = self.shares_master
            self.own_span.copy_(fresh)
            self.shelf.put()
            if not shares:
                take_edits(self.home, self.master, fresh, unchanged)
        self.shelf.drop()

    def is_edited(self, group: ProcessGroup | None) -> bool:
        """Whether the PRESENT parameters differ in any bit from the truth of all ranks.  A collective."""
        assert self.full is not None
        whole = self.full[: self.bucket.numel]
        truth = torch.empty_like(whole)
        zcomm.all_gather(truth, self.own_span, group, label=f"weights of unit {self.bucket.unit!r}")
        self.shelf.drop()
        return not torch.equal(whole.view(torch.uint8), truth.view(torch.uint8))

    def publish(self) -> None:
        """Cast the master into the span; what was gathered before is stale, and the caller releases it."""
        self.source.stale()
        self.shelf.publish(self.home, self.master)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The parameters' parts inside `master`."""
        return tuple(self.bucket.pieces(rank))

    def was_written(self) -> bool:
        """Whether somebody has filled hollow parameters (they share one number).  Looked at on CPUs only.

        They are NaN again afterwards.
        """
        if not self.hollow[0].is_cpu:
            return False
        poison = self.hollow[0].as_strided((), ())
        written = not bool(poison.isnan())
        if written:
            poison.fill_(torch.nan)
        return written

    def moved(self) -> str:
        """Name of the first parameter that has memory of its own again; "" when none has."""
        home = self.full if self.full is not None and self.presence is Presence.PRESENT else self.hollow[0]
        storage = home.untyped_storage()._cdata
        for slot, param in zip(self.bucket.slots, self.params):
            same = param.dtype == self.bucket.dtype and param.untyped_storage()._cdata == storage
            if slot.numel and not same:
                return slot.name
        return ""

    def close(self) -> None:
        """Give every PRESENT parameter memory of its own; those of a RESTING bucket become empty of content."""
        if self.presence is Presence.PRESENT:
            for param in self.params:
                param.data = param.data.clone()
        self.full, self.presence = None, Presence.RESTING

    def _point(self, tensors: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> None:
        for param, tensor in zip(self.params, tensors):
            param.data = tensor


def _views(bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    return [buffer[slot.offset : slot.end].view(slot.shape) for slot in bucket.slots]


def make_storage(
    bucket: Bucket, params: Mapping[str, Parameter], policy: ZeroPolicy, ranks: Ranks
) -> BucketStorage | ShardedStorage:
    """Flat memory for the weights of one bucket: whole, or at rest as a shard.  `params` by name."""
    if bucket.unit is not None:
        return ShardedStorage.of(bucket, params, policy, ranks)
    members = tuple(params[slot.name] for slot in bucket.slots)
    flat = flat_zeros(bucket.numel, bucket.dtype, members[0].device, ranks.having(bucket).shard)
    return BucketStorage.create(bucket, members, policy, ranks.rank, flat)
