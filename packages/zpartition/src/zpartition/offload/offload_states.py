"""Between phases of a run: what a partition holds, moved off the device and back, bit for bit.

While a policy is generated from, or another model is evaluated, the memory of training is needed elsewhere.  Tensors
are emptied in place, so that everybody who refers to one (the optimizer, its plans, hooks) refers to what comes back.
Until then the partition refuses to be used, and so do the module and the optimizer where they would show, load or
step what is away.

Everything is copied before anything is emptied, and everything read before anything is filled: a rank whose memory or
disk is full, or whose drive fails, makes all ranks stay as they were.

Gradients have no values between steps; their buffers are dropped, and made again when they are needed.
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
from zpartition.offload.manager import open_store
from zpartition.state.counts import is_large
from zpartition.weights.storage import BucketStorage

__all__ = ["OffloadedStates", "offload_all"]


@attrs.frozen(eq=False)
class _OffloadedTensor:
    """One tensor that was emptied."""

    tensor: Tensor
    shape: torch.Size
    is_shared: bool  # ranks map its memory
    host: Tensor | None  # its values, unless they are in `region`
    region: Region | None


@final
@attrs.define(eq=False)
class OffloadedStates:
    """Tensors that are offloaded, and how they are reloaded."""

    what: frozenset[OffloadStateType]
    entries: list[_OffloadedTensor]
    stores: list[DiskStore]  # one, if it is on disk
    views: list[tuple[Tensor, Tensor, slice, torch.Size]]  # (parameter or master, flat buffer, elements, shape)
    hooks: list[Any]  # refuse what would need it

    def reload(self, partition: PartitionState) -> None:
        """Everything is as it was.  A collective."""
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
        """`values`, with what was copied away."""
        if entry.region is not None:
            buffer = self.stores[0].buffer(entry.region.num_bytes)
            self.stores[0].read(entry.region, buffer).wait()
            values.view(-1).copy_(buffer[: entry.region.num_bytes].view(values.dtype))
        elif entry.host is not None:
            values.copy_(entry.host)
        return values

    def close(self) -> None:
        """Forget the values."""
        for hook in self.hooks:
            hook.remove()
        for store in self.stores:
            store.close(remove=True)
        self.entries, self.stores, self.views, self.hooks = [], [], [], []


def offload_all(partition: PartitionState, what: frozenset[OffloadStateType], offload: Offload) -> OffloadedStates:
    """Move `what` to the tier `offload.states`; tensors on it, or on a slower one, stay.  A collective."""
    offloaded = OffloadedStates(what, [], [], [], [])
    _drop_buffers(partition, what)
    partition.unsharder.release_all()
    to_disk = offload.states is Tier.DISK
    try:
        with _all_or_none("offload its states", partition.group):
            if to_disk:
                offloaded.stores.append(open_store(offload, partition.group))
            for tensor, is_shared in _tensors(partition, what, to_disk):
                offloaded.entries.append(_copied(tensor, is_shared, offloaded, offload))
    except BaseException:
        offloaded.close()
        raise
    if OffloadStateType.WEIGHTS in what:
        _unshare(partition, offloaded)
        _hollow(partition, offloaded)
    for entry in offloaded.entries:
        entry.tensor.data = torch.empty(0, **_like(entry.tensor))
    offloaded.hooks.extend(_guard_hooks(partition, what))
    return offloaded


@contextmanager
def _all_or_none(doing: str, group: ProcessGroup | None) -> Iterator[None]:
    """If the body fails on one rank, all of them raise.  A collective."""
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
        raise RuntimeError(f"rank {rank} could not {doing}, so no rank has: all is as it was. {errors[rank]}")


def _copied(tensor: Tensor, is_shared: bool, offloaded: OffloadedStates, offload: Offload) -> _OffloadedTensor:
    """Copy the values away."""
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


def _guard_hooks(partition: PartitionState, what: frozenset[OffloadStateType]) -> Iterator[Any]:
    """Hooks that refuse to compute with, show, load or step what is away."""
    for module in partition.module.modules():
        if OffloadStateType.WEIGHTS in what:
            yield module.register_forward_pre_hook(_raise_weights_offloaded, prepend=True)
            yield module.register_state_dict_pre_hook(_raise_weights_offloaded)  # type: ignore[no-untyped-call]
        yield module.register_load_state_dict_pre_hook(_raise_offloaded)  # type: ignore[no-untyped-call]
    if partition.optimizer is None:
        return
    if what & {OffloadStateType.STATES, OffloadStateType.MASTERS, OffloadStateType.WEIGHTS}:
        yield partition.optimizer.register_step_pre_hook(_raise_offloaded)
    if OffloadStateType.STATES in what:
        yield partition.optimizer.register_state_dict_pre_hook(_raise_offloaded)
        yield partition.optimizer.register_load_state_dict_pre_hook(_raise_offloaded)


def _tensors(
    partition: PartitionState, what: Collection[OffloadStateType], to_disk: bool
) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors to be emptied, each once, and whether ranks map its memory."""
    tiers = {id(storage.master): storage.placement.tier for storage in partition.storages}
    movable = {Tier.DEVICE, Tier.HOST} if to_disk else {Tier.DEVICE}
    if OffloadStateType.STATES in what and partition.optimizer is not None:
        for master, entry in partition.optimizer.state.items():
            if tiers.get(id(master), Tier.DEVICE) in movable:
                yield from ((value, False) for key, value in entry.items() if is_large(key, value))
    if OffloadStateType.MASTERS in what:
        for storage in partition.storages:
            if storage.placement.tier in movable and not storage.shares_master:
                yield storage.master, False
    if OffloadStateType.WEIGHTS in what:
        for storage in partition.whole:
            yield storage.flat, storage.flat.is_cpu
        for unit in partition.unsharder.units.values():
            for each in unit.storages:
                if isinstance(each.param_placement, DeviceParams):
                    yield each.param_placement.span, each.param_placement.span.is_cpu


def _hollow(partition: PartitionState, offloaded: OffloadedStates) -> None:
    """Let parameters whose memory is emptied read as NaN, and remember where they belong."""
    for storage in partition.whole:
        poison = torch.full((), torch.nan, dtype=storage.flat.dtype, device=storage.flat.device)
        for slot, param in zip(storage.bucket.slots, storage.params):
            offloaded.views.append((param, storage.flat, slice(slot.offset, slot.end), torch.Size(slot.shape)))
            param.data = poison.expand(slot.shape)


def _unshare(partition: PartitionState, offloaded: OffloadedStates) -> None:
    """Masters that are part of the weights' memory would keep it alive."""
    for storage in (*partition.storages, *partition.frozen):
        if not storage.shares_master:
            continue
        whole = isinstance(storage, BucketStorage)
        base = storage.flat if isinstance(storage, BucketStorage) else storage.own_span
        elements = slice(*storage.span) if whole else slice(0, base.numel())
        offloaded.views.append((storage.master, base, elements, storage.master.shape))
        poison = torch.full((), torch.nan, dtype=base.dtype, device=base.device)
        storage.master.data = poison.expand(storage.master.shape)


def _drop_buffers(partition: PartitionState, what: Collection[OffloadStateType]) -> None:
    for gradient in partition.reducer.gradients if OffloadStateType.GRADIENTS in what else ():
        gradient.store = None
        gradient.forget_views()
    if OffloadStateType.BUFFERS in what:
        partition.reducer.pool.clear()
        partition.unsharder.pool.clear()


def _raise_weights_offloaded(*_: object) -> None:
    raise RuntimeError(
        "the weights of this module are offloaded by offload_states(): call reload_states(), on every rank, first"
    )


def _raise_offloaded(*_: object) -> None:
    raise RuntimeError(
        "states that this call needs are offloaded by offload_states(): call reload_states(), on every rank, first"
    )
