"""Sharded weights: one bucket of a unit at stage 3.

This rank's span is persistent.  The full bucket exists while a module needs it, in a buffer from a pool that all
units share; the module's parameters are views of that buffer then, and *hollow* otherwise: tensors of the right
shape, dtype and device that are one NaN, repeated by strides of 0.  A stray read returns NaN, and torch rejects
writes; a placeholder of shape (0,), or of zeros, would be wrong silently.  Codes have all bits set: as the bytes of a
scale these are a NaN, too.

Rejected: resizing the storage under the views to zero (as FSDP).  A CPU kernel that reads such a tensor crashes the
process; and filling it again maps fresh pages, which takes three times as long as the copy itself.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import final

import attrs
import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition._compat import storage_key
from zpartition.deferred.init import Deferred
from zpartition.layout.layout import Bucket, Piece, Slot
from zpartition.layout.policy import Tier, ZeroPolicy
from zpartition.layout.ranks import Ranks
from zpartition.memory.buffers import BufferPool, flat_zeros
from zpartition.memory.placement import (
    ON_DEVICE,
    DeviceParams,
    MasterPlacement,
    ParamPlacement,
    refresh_changed,
    same_bits,
)
from zpartition.memory.poison import is_poison, poison_of
from zpartition.weights.gather_sources import SHARDS, GatherSource, source_for
from zpartition.weights.storage import BucketStorage

__all__ = ["ShardedState", "ShardedStorage", "Storage", "fill_storages", "make_storage"]


class ShardedState(enum.Enum):
    """State of a bucket's weights, and its memory cost."""

    SHARDED = "sharded"  # the span alone
    GATHERING = "gathering"  # also a buffer of bucket.numel, which a collective fills
    UNSHARDED = "unsharded"  # the same, and the parameters are views of it


@final
@attrs.define(eq=False)
class ShardedStorage:
    """Weights of one bucket on one rank, gathered on demand.

    Invariants: `full is None` exactly when SHARDED; the parameters are views of `full` exactly when UNSHARDED.
    """

    bucket: Bucket
    params: tuple[Parameter, ...]  # in slot order
    span: tuple[int, int]  # of this rank
    param_placement: ParamPlacement  # of (span numel,) exact weights, which ranks gather
    master: Parameter  # (span numel,) master dtype: `own_span` itself, or memory of its own
    hollow: tuple[torch.Tensor, ...]  # the parameters while SHARDED, in slot order
    is_trained: bool = True  # whether an optimizer updates it
    source: GatherSource = SHARDS  # of gathers, instead of `own_span`
    placement: MasterPlacement = ON_DEVICE  # of master and states
    sharded_state: ShardedState = ShardedState.SHARDED
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
        """Allocate the span of `params`, which keep their memory until `adopt` or `adopt_part`."""
        group, (lo, hi) = ranks.groups_for(bucket).shard, bucket.span(ranks.rank)
        own = flat_zeros(hi - lo, bucket.dtype, params[0].device, group)
        master = Parameter(own.to(policy.master_for(bucket.dtype)) if is_trained else own, requires_grad=is_trained)
        poison = torch.full((), poison_of(bucket.dtype), dtype=bucket.dtype, device=own.device)
        hollow = tuple(poison.expand(slot.shape) for slot in bucket.slots)
        source = source_for(bucket, policy.of(bucket), group, own.device, is_trained=is_trained)
        return cls(bucket, params, (lo, hi), DeviceParams(own), master, hollow, is_trained, source)

    @property
    def own_span(self) -> torch.Tensor:
        """(span numel,) on the device: the exact shard that ranks gather, until `ParamPlacement.unload`."""
        return self.param_placement.load()

    def adopt(self, world: ProcessGroup | None) -> None:
        """Shard the parameters, with rank 0's values; their own memory is released."""
        full = torch.zeros(self.bucket.numel, dtype=self.bucket.dtype, device=self.hollow[0].device)
        for slot, param in zip(self.bucket.slots, self.params):
            full[slot.offset : slot.end].view(slot.shape).copy_(param.data)
        zcomm.broadcast(full, world, source=0, label=f"weights of unit {self.bucket.unit!r}")
        self.own_span.copy_(full[self.span[0] : self.span[1]])
        self.param_placement.write_back()
        self.refresh_master()
        self._point(self.hollow)

    def adopt_part(self, slot: Slot, values: torch.Tensor) -> None:
        """Copy this rank's part of one parameter's `values`."""
        self._point(self.hollow)
        start, stop = max(self.span[0], slot.offset), min(self.span[1], slot.end)
        if start < stop:
            part = values.reshape(-1)[start - slot.offset : stop - slot.offset]
            self.own_span[start - self.span[0] : stop - self.span[0]].copy_(part)
            self.param_placement.write_back()

    def refresh_master(self) -> None:
        """Copy the span into the master."""
        self.placement.refresh(self.master, self.own_span)
        self.param_placement.unload()

    @classmethod
    def of(
        cls,
        bucket: Bucket,
        params: Mapping[str, Parameter],
        policy: ZeroPolicy,
        ranks: Ranks,
        is_trained: bool = True,
    ) -> ShardedStorage:
        """Call `create` with the parameters by name."""
        return cls.create(bucket, tuple(params[slot.name] for slot in bucket.slots), policy, ranks, is_trained)

    @property
    def persistent_bytes(self) -> int:
        """Bytes of the weights between steps, on the device."""
        return self.param_placement.num_bytes if self.param_placement.tier is Tier.DEVICE else 0

    @property
    def shares_master(self) -> bool:
        """True if the optimizer updates the shard that is gathered."""
        return self.param_placement.tier is Tier.DEVICE and self.master.data_ptr() == self.own_span.data_ptr()

    @property
    def is_exact(self) -> bool:
        """True if modules see the spans unchanged, straight from their owners."""
        return self.source is SHARDS

    def gather(self, pool: BufferPool, group: ProcessGroup | None, *, exact: bool = False) -> None:
        """SHARDED -> GATHERING: start to collect the weights into a buffer; `arrive` waits for it.

        exact: gather the spans themselves, not the values that the policy lets modules compute with.
        """
        assert self.sharded_state is ShardedState.SHARDED
        own = self.own_span  # first, since a read from disk may fail
        self.full = pool.obtain(self.bucket.numel, self.bucket.dtype)
        whole, label = self.full[: self.bucket.numel], f"weights of unit {self.bucket.unit!r}"
        source = SHARDS if exact else self.source
        self.handle = source.gather(whole, own, group, pool, label)
        self.sharded_state = ShardedState.GATHERING

    def begin_reading(self) -> None:
        """Prefetch the shard of a bucket that will be gathered soon."""
        if self.sharded_state is ShardedState.SHARDED:
            self.param_placement.prefetch()

    def arrive(self) -> None:
        """GATHERING -> UNSHARDED: wait, and make the parameters views of the buffer."""
        assert self.sharded_state is ShardedState.GATHERING
        assert self.full is not None
        self.handle.wait()
        self.handle = zcomm.DONE
        self.param_placement.unload()
        self._point(_views(self.bucket, self.full))
        self.sharded_state = ShardedState.UNSHARDED

    def release(self, pool: BufferPool) -> None:
        """Return to SHARDED from any state; writes into parameters are lost unless `adopt_weights` copied them."""
        if self.sharded_state is ShardedState.GATHERING:
            self.handle.wait()
            self.handle = zcomm.DONE
            self.param_placement.unload()
        if self.full is not None:
            self._point(self.hollow)
            pool.reclaim(self.full)
            self.full = None
        self.sharded_state = ShardedState.SHARDED

    def adopt_weights(self) -> None:
        """Copy the UNSHARDED parameters into this rank's span and its master."""
        assert self.full is not None
        self.own_span.copy_(self.full[self.span[0] : self.span[1]])
        self.param_placement.write_back()
        self.source.invalidate()
        self.refresh_master()

    def adopt_edits(self) -> None:
        """Call `adopt_weights`, but keep the master of unchanged elements."""
        assert self.full is not None
        fresh = self.full[self.span[0] : self.span[1]]
        unchanged = same_bits(fresh, self.own_span)
        self.source.invalidate()  # also on ranks without edits: the next gather must be the same on all
        if not bool(unchanged.all()):
            shares = self.shares_master
            self.own_span.copy_(fresh)
            self.param_placement.write_back()
            if not shares:
                refresh_changed(self.placement, self.master, fresh, unchanged)
        self.param_placement.unload()

    def adopt_rounded(self) -> None:
        """Copy the UNSHARDED parameters, which were rounded, into this rank's span; the master stays."""
        assert self.full is not None
        self.own_span.copy_(self.full[self.span[0] : self.span[1]])
        self.param_placement.write_back()
        self.source.invalidate()
        self.param_placement.unload()

    def is_edited(self, group: ProcessGroup | None) -> bool:
        """Return whether the UNSHARDED parameters differ in any bit from the exact shards.  A collective."""
        assert self.full is not None
        whole = self.full[: self.bucket.numel]
        truth = torch.empty_like(whole)
        zcomm.all_gather(truth, self.own_span, group, label=f"weights of unit {self.bucket.unit!r}")
        self.param_placement.unload()
        return not torch.equal(whole.view(torch.uint8), truth.view(torch.uint8))

    def publish(self) -> None:
        """Cast the master into the span; gathered weights are then outdated, and the caller releases them."""
        self.source.invalidate()
        self.param_placement.publish(self.placement, self.master)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the parameters' parts inside `master`."""
        return tuple(self.bucket.pieces(rank))

    def was_written(self) -> bool:
        """Return whether user code has filled hollow parameters (they share one number).  Checked on CPUs only.

        They are NaN again afterwards.
        """
        if not self.hollow[0].is_cpu:
            return False
        poison = self.hollow[0].as_strided((), ())
        written = not is_poison(poison)
        if written:
            poison.fill_(poison_of(poison.dtype))
        return written

    def moved(self) -> str:
        """Return the name of the first parameter with memory of its own; "" if there is none."""
        base = self.full if self.full is not None and self.sharded_state is ShardedState.UNSHARDED else self.hollow[0]
        storage = storage_key(base)
        for slot, param in zip(self.bucket.slots, self.params):
            same = param.dtype == self.bucket.dtype and storage_key(param) == storage
            if slot.numel and not same:
                return slot.name
        return ""

    def close(self) -> None:
        """Give every UNSHARDED parameter its own memory; parameters of a SHARDED bucket stay NaN."""
        if self.sharded_state is ShardedState.UNSHARDED:
            for param in self.params:
                param.data = param.data.clone()
        self.full, self.sharded_state = None, ShardedState.SHARDED

    def leave(self) -> ParamPlacement | None:
        """Return the shard of a partition that was dropped; None if it is offloaded.

        Parameters of an UNSHARDED bucket keep their values if these are exact; others are hollow.
        """
        if self.sharded_state is ShardedState.GATHERING or not self.is_exact:
            self._point(self.hollow)
        is_on_device = self.param_placement.tier is Tier.DEVICE
        return None if is_on_device and not self.own_span.numel() else self.param_placement

    def _point(self, tensors: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> None:
        for param, tensor in zip(self.params, tensors):
            param.data = tensor


def _views(bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    return [buffer[slot.offset : slot.end].view(slot.shape) for slot in bucket.slots]


def make_storage(
    bucket: Bucket, params: Mapping[str, Parameter], policy: ZeroPolicy, ranks: Ranks
) -> BucketStorage | ShardedStorage:
    """Allocate flat memory for the weights of one bucket, sharded if it belongs to a unit.  `params` by name."""
    if bucket.unit is not None:
        return ShardedStorage.of(bucket, params, policy, ranks)
    members = tuple(params[slot.name] for slot in bucket.slots)
    flat = flat_zeros(bucket.numel, bucket.dtype, members[0].device, ranks.groups_for(bucket).shard)
    return BucketStorage.create(bucket, members, policy, ranks.rank, flat)


Storage = BucketStorage | ShardedStorage


def fill_storages(deferred: Deferred, storages: Sequence[Storage], group: ProcessGroup | None) -> None:
    """Materialize a deferred module into the storages; tensors outside of them keep their values whole."""
    places: dict[str, tuple[Storage, Slot]] = {}
    for storage in storages:
        places.update({slot.name: (storage, slot) for slot in storage.bucket.slots})

    def adopt(name: str, values: torch.Tensor) -> None:
        if name not in places:
            if name in deferred.tensors:  # otherwise it has values, which `ReplicatedTensors` broadcasts
                tensor = deferred.tensors[name]
                tensor.data = values.to(tensor.device, copy=True)
            return
        storage, slot = places[name]
        if isinstance(storage, ShardedStorage):
            storage.adopt_part(slot, values)
        else:
            storage.flat[slot.offset : slot.end].view(slot.shape).copy_(values)

    with torch.no_grad():
        deferred.fill(adopt, group)
    for storage in storages:
        storage.refresh_master()
