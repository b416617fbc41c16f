"""Offloaded states: moving the memory of a partition off the device between phases of a run, and back, bit for bit.

While a policy generates rollouts, or another model is evaluated, the memory of training is needed elsewhere.  Tensors
are emptied in place, so that references to them (of the optimizer, its plans, hooks) stay valid after the reload.
Until then the partition raises when it is used, and so do the module and the optimizer when they would show, load or
step offloaded tensors.

All tensors are copied before any is emptied, and all are read before any is filled: if the memory or disk of a rank
is full, or its drive fails, no rank changes.

Gradients have no values between steps; their buffers are dropped, and allocated again on demand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zpartition.core import PartitionState
from zpartition.disk import DiskStore, Region
from zpartition.layout.policy import Offload, OffloadStateType, Tier
from zpartition.memory.buffers import flat_zeros
from zpartition.memory.placement import DeviceParams
from zpartition.memory.poison import poison_of
from zpartition.offload.manager import open_store
from zpartition.state.counts import is_large
from zpartition.weights.storage import BucketStorage

__all__ = ["OffloadedStates", "offload_all"]


@attrs.frozen(eq=False)
class _OffloadedTensor:
    """One emptied tensor."""

    tensor: Tensor
    shape: torch.Size
    is_shared: bool  # ranks map its memory
    host: Tensor | None  # its values, unless they are in `region`
    region: Region | None


@final
@attrs.define(eq=False)
class OffloadedStates:
    """Tensors that are offloaded, and how to reload them."""

    kinds: frozenset[OffloadStateType]
    entries: list[_OffloadedTensor]
    stores: list[DiskStore]  # one, if they are on disk
    views: list[tuple[Tensor, Tensor, slice, torch.Size]]  # (parameter or master, flat buffer, elements, shape)
    hooks: list[Any]  # raise in calls that need the tensors

    def reload(self, partition: PartitionState) -> None:
        """Restore all tensors.  A collective."""
        found: list[Tensor] = []
        group = partition.ranks.shard
        mapped = [
            flat_zeros(e.shape.numel(), e.tensor.dtype, partition.device, group) for e in self.entries if e.is_shared
        ]
        with _all_or_none("reload its states", partition.group):
            for entry in self.entries:
                made = mapped.pop(0) if entry.is_shared else torch.empty(entry.shape, **_like(entry.tensor))
                found.append(self._filled(entry, made))
        for entry, values in zip(self.entries, found):
            entry.tensor.data = values
        for tensor, flat, elements, shape in self.views:
            tensor.data = flat[elements].view(shape)

    def _filled(self, entry: _OffloadedTensor, values: Tensor) -> Tensor:
        """Fill `values` from the copy, and return it."""
        if entry.region is not None:
            buffer = self.stores[0].buffer(entry.region.num_bytes)
            self.stores[0].read(entry.region, buffer).wait()
            values.view(-1).copy_(buffer[: entry.region.num_bytes].view(values.dtype))
        elif entry.host is not None:
            values.copy_(entry.host)
        return values

    def close(self) -> None:
        """Drop the copies."""
        for hook in self.hooks:
            hook.remove()
        for store in self.stores:
            store.close(remove=True)
        self.entries, self.stores, self.views, self.hooks = [], [], [], []


def offload_all(partition: PartitionState, kinds: frozenset[OffloadStateType], offload: Offload) -> OffloadedStates:
    """Move states to the tier `offload.states`; tensors on it, or on a slower one, stay.  A collective."""
    offloaded = OffloadedStates(kinds, [], [], [], [])
    _drop_buffers(partition, kinds)
    partition.unsharder.release_all()
    to_disk = offload.states is Tier.DISK
    try:
        with _all_or_none("offload its states", partition.group):
            if to_disk:
                offloaded.stores.append(open_store(offload, partition.group))
            for tensor, is_shared in _tensors(partition, kinds, to_disk):
                offloaded.entries.append(_copied(tensor, is_shared, offloaded, offload))
    except BaseException:
        offloaded.close()
        raise
    if OffloadStateType.WEIGHTS in kinds:
        _unshare(partition, offloaded)
        _hollow(partition, offloaded)
    for entry in offloaded.entries:
        entry.tensor.data = torch.empty(0, **_like(entry.tensor))
    offloaded.hooks.extend(_guard_hooks(partition, kinds))
    return offloaded


@contextmanager
def _all_or_none(doing: str, group: ProcessGroup | None) -> Iterator[None]:
    """Raise on all ranks if the body fails on one.  A collective."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    errors = zcomm.all_gather_object("" if problem is None else f"{type(problem).__name__}: {problem}", group)
    if problem is not None:
        raise problem
    if any(errors):
        rank = next(index for index, text in enumerate(errors) if text)
        raise RuntimeError(f"rank {rank} could not {doing}, so no rank changed anything: {errors[rank]}")


def _copied(tensor: Tensor, is_shared: bool, offloaded: OffloadedStates, offload: Offload) -> _OffloadedTensor:
    """Copy the values to the host or into a file."""
    host, region = None, None
    if offloaded.stores:
        store = offloaded.stores[0]
        region = store.allocate(f"parked {len(offloaded.entries)}", tensor.nbytes)
        store.write(region, tensor.detach().cpu().contiguous()).wait()
    else:
        pin = offload.pin and tensor.is_cuda
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        host.copy_(tensor.detach())
    return _OffloadedTensor(tensor, tensor.shape, is_shared, host, region)


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def _guard_hooks(partition: PartitionState, kinds: frozenset[OffloadStateType]) -> Iterator[Any]:
    """Register hooks that raise in calls that compute with, show, load or step offloaded tensors."""
    for module in partition.module.modules():
        if OffloadStateType.WEIGHTS in kinds:
            yield module.register_forward_pre_hook(_raise_weights_offloaded, prepend=True)
            yield module.register_state_dict_pre_hook(_raise_weights_offloaded)  # type: ignore[no-untyped-call]
        yield module.register_load_state_dict_pre_hook(_raise_offloaded)  # type: ignore[no-untyped-call]
    if partition.optimizer is None:
        return
    if kinds & {OffloadStateType.STATES, OffloadStateType.MASTERS, OffloadStateType.WEIGHTS}:
        yield partition.optimizer.register_step_pre_hook(_raise_offloaded)
    if OffloadStateType.STATES in kinds:
        yield partition.optimizer.register_state_dict_pre_hook(_raise_offloaded)
        yield partition.optimizer.register_load_state_dict_pre_hook(_raise_offloaded)


def _tensors(
    partition: PartitionState, kinds: Collection[OffloadStateType], to_disk: bool
) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors to empty, each once, and whether ranks map its memory."""
    tiers = {id(storage.master): storage.placement.tier for storage in partition.storages}
    movable = {Tier.DEVICE, Tier.HOST} if to_disk else {Tier.DEVICE}
    if OffloadStateType.STATES in kinds and partition.optimizer is not None:
        for master, entry in partition.optimizer.state.items():
            if tiers.get(id(master), Tier.DEVICE) in movable:
                yield from ((value, False) for key, value in entry.items() if is_large(key, value))
    if OffloadStateType.MASTERS in kinds:
        for storage in partition.storages:
            if storage.placement.tier in movable and not storage.shares_master:
                yield storage.master, False
    if OffloadStateType.WEIGHTS in kinds:
        for storage in partition.whole:
            yield storage.flat, storage.flat.is_cpu
        for unit in partition.unsharder.units.values():
            for each in unit.storages:
                if isinstance(each.param_placement, DeviceParams):
                    yield each.param_placement.span, each.param_placement.span.is_cpu


def _hollow(partition: PartitionState, offloaded: OffloadedStates) -> None:
    """Let parameters in emptied memory read as NaN, and record their views."""
    for storage in partition.whole:
        poison = torch.full((), poison_of(storage.flat.dtype), dtype=storage.flat.dtype, device=storage.flat.device)
        for slot, param in zip(storage.bucket.slots, storage.params):
            offloaded.views.append((param, storage.flat, slice(slot.offset, slot.end), torch.Size(slot.shape)))
            param.data = poison.expand(slot.shape)


def _unshare(partition: PartitionState, offloaded: OffloadedStates) -> None:
    """Detach masters from the weights' memory, which they would keep alive."""
    for storage in (*partition.storages, *partition.frozen):
        if not storage.shares_master:
            continue
        whole = isinstance(storage, BucketStorage)
        base = storage.flat if isinstance(storage, BucketStorage) else storage.own_span
        elements = slice(*storage.span) if whole else slice(0, base.numel())
        offloaded.views.append((storage.master, base, elements, storage.master.shape))
        poison = torch.full((), poison_of(base.dtype), dtype=base.dtype, device=base.device)
        storage.master.data = poison.expand(storage.master.shape)


def _drop_buffers(partition: PartitionState, kinds: Collection[OffloadStateType]) -> None:
    for gradient in partition.reducer.gradients if OffloadStateType.GRADIENTS in kinds else ():
        gradient.store = None
        gradient.forget_views()
    if OffloadStateType.BUFFERS in kinds:
        partition.reducer.pool.clear()
        partition.unsharder.pool.clear()


def _raise_weights_offloaded(*_: object) -> None:
    raise RuntimeError(
        "the weights of this module are offloaded by offload_states(): call reload_states() on every rank first"
    )


def _raise_offloaded(*_: object) -> None:
    raise RuntimeError(
        "states that this call needs are offloaded by offload_states(): call reload_states() on every rank first"
    )
