"""Ownership of parameters: which partition owns the memory of a parameter, and which parameters may be partitioned.

A parameter's memory belongs to one partition at a time.  Ownership is stored in this module, not on the parameter,
and ends with the partition, closed or not.

Dropped partitions.  A partition that is garbage-collected without `close` cannot gather its sharded weights: ranks
collect garbage at different times.  So each rank's shards stay with the parameters, which read as NaN, until
`reclaim_weights` gathers them: before the module is partitioned again, on all ranks.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition.core import PartitionState
from zpartition.deferred.fake_device import clear_fake_device
from zpartition.deferred.init import suspend_init
from zpartition.layout.layout import Bucket
from zpartition.memory.placement import ParamPlacement
from zpartition.memory.poison import is_poison
from zpartition.weights.sharded import ShardedStorage


class Removable(Protocol):
    """A hook, or a set of hooks."""

    def remove(self) -> None: ...


@final
@attrs.frozen(eq=False)
class _LeftShard:
    """This rank's shard of one bucket whose partition was dropped."""

    bucket: Bucket
    params: tuple[weakref.ref[Parameter], ...]  # in slot order
    hollow: tuple[Tensor, ...]  # the parameters while nobody has replaced them, in slot order
    placement: ParamPlacement  # of the shard
    group: ProcessGroup | None  # ranks that hold the others

    def gather(self) -> None:
        """Give the parameters that are still hollow their weights.  A collective."""
        whole = self.hollow[0].new_empty(self.bucket.numel)
        label = f"weights of unit {self.bucket.unit!r}"
        zcomm.all_gather(whole, self.placement.load(), self.group, label=label)
        self.placement.unload()
        for slot, known, hollow in zip(self.bucket.slots, self.params, self.hollow):
            param = known()
            if param is not None and param.data_ptr() == hollow.data_ptr():
                param.data = whole[slot.offset : slot.end].view(slot.shape).clone()


_owners: dict[int, weakref.ref[PartitionState]] = {}  # id(parameter) -> the partition that owns its memory
_left: dict[int, _LeftShard] = {}  # id(parameter) -> its shard, left by a dropped partition
_finalizers: weakref.WeakKeyDictionary[PartitionState, weakref.finalize[Any, PartitionState]] = (
    weakref.WeakKeyDictionary()
)


def acquire_ownership(partition: PartitionState, hooks: Sequence[Removable]) -> None:
    """Let `partition` own the memory of its parameters; ownership and hooks end when it is garbage-collected."""
    params, storages = partition.owned(), (*partition.storages, *partition.frozen)
    for param in params:
        _owners[id(param)] = weakref.ref(partition)
    sharded = [
        (storage, partition.ranks.groups_for(storage.bucket).shard)
        for storage in storages
        if isinstance(storage, ShardedStorage)
    ]
    if (previous := _finalizers.pop(partition, None)) is not None:
        previous.detach()
    _finalizers[partition] = weakref.finalize(partition, forget, [id(param) for param in params], hooks, sharded)


def release_ownership(partition: PartitionState) -> None:
    """End the ownership of all parameters of `partition`."""
    for param in partition.owned():
        _owners.pop(id(param), None)
    if (finalizer := _finalizers.pop(partition, None)) is not None:
        finalizer.detach()


def reclaim_weights(module: nn.Module) -> None:
    """Check that no partition owns parameters of `module`; gather weights that a dropped one has left sharded.

    A collective over its ranks in the latter case.  Raises ValueError if a living partition owns a parameter, or one
    has no weights.
    """
    clear_fake_device(module.parameters())
    check_free(dict(module.named_parameters()))


@suspend_init()
def check_free(params: Mapping[str, Parameter]) -> None:
    """Do the work of `reclaim_weights` for `params`, by name."""
    if any(owner_of(param) is not None for param in params.values()):
        gc.collect()  # the owner may be garbage in a cycle
    for name, param in params.items():
        check_not_owned(name, param)
    left = {id(shard): shard for param in params.values() if (shard := _left.get(id(param))) is not None}
    for shard in left.values():
        shard.gather()
    for param in params.values():
        _left.pop(id(param), None)
    for name, param in params.items():
        check_has_weights(name, param)


def named_groups(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Return the parameter group of each parameter to partition, by name."""
    names = {id(param): name for name, param in module.named_parameters()}
    if optimizer is None:
        return {name: 0 for name, param in module.named_parameters() if param.requires_grad}
    groups: dict[str, int] = {}
    for index, param_group in enumerate(optimizer.param_groups):
        for position, param in enumerate(param_group["params"]):
            if id(param) not in names:
                raise ValueError(
                    f"parameter {position} of the optimizer's group {index}, shape {tuple(param.shape)}, is not a "
                    "parameter of the module. Build the optimizer from this module's parameters(). (An optimizer "
                    "that was partitioned before keeps those shards, also after close(): create a new one, and "
                    "transfer its state in a checkpoint.)"
                )
            if param.requires_grad:
                groups[names[id(param)]] = index
    return groups


def owner_of(param: Parameter) -> PartitionState | None:
    """Return the living partition that owns the memory of `param`."""
    found = _owners.get(id(param))
    owner = None if found is None else found()
    return owner if owner is not None and owner.owns(param) else None


def acquirer_of(param: Parameter) -> PartitionState | None:
    """Return the living partition that acquired `param`: a faster `owner_of`."""
    found = _owners.get(id(param))
    return None if found is None else found()


def check_not_owned(name: str, param: Parameter) -> None:
    """Raise ValueError if a living partition owns the memory of `param`."""
    if owner_of(param) is not None:
        raise ValueError(
            f"parameter {name} is partitioned already: close() the partition (or the engine) that owns the module, "
            "or drop every reference to it, before you partition it again"
        )


def check_has_weights(name: str, param: Parameter) -> None:
    """Raise ValueError for a hollow parameter: its stage 3 partition ended without its weights."""
    is_hollow = param.dim() > 0 and param.numel() > 1 and not any(param.stride())
    if is_hollow and not param.is_meta and is_poison(param.detach().as_strided((), ())):
        raise ValueError(
            f"parameter {name} has no weights: its partition was closed with keep_weights=False, or could not be "
            "completed. Build the module again, or load its weights."
        )


def forget(
    param_ids: list[int], hooks: Sequence[Removable], sharded: Sequence[tuple[ShardedStorage, ProcessGroup | None]]
) -> None:
    """Remove the hooks and the ownership of a partition that was dropped without close(); keep its shards."""
    for hook in hooks:
        hook.remove()
    for param_id in param_ids:
        if (owner := _owners.get(param_id)) is not None and owner() is None:
            del _owners[param_id]
    for storage, group in sharded:
        _leave(storage, group)


def _leave(storage: ShardedStorage, group: ProcessGroup | None) -> None:
    """Keep a shard until its parameters are gone, or reclaimed; unless it is offloaded (`offload_states`)."""
    placement = storage.leave()
    if placement is None:
        return
    refs = tuple(weakref.ref(param, functools.partial(_forget_left, id(param))) for param in storage.params)
    left = _LeftShard(storage.bucket, refs, storage.hollow, placement, group)
    _left.update(dict.fromkeys(map(id, storage.params), left))


def _forget_left(param_id: int, _: object) -> None:
    _left.pop(param_id, None)


def one_device(params: dict[str, Parameter]) -> torch.device:
    """Return the device of all `params`.  Raises ValueError for several devices, or complex parameters."""
    devices: dict[torch.device, str] = {}
    for name, param in params.items():
        devices.setdefault(param.device, name)
        if param.is_complex():
            raise ValueError(f"parameter {name} is {param.dtype}; complex parameters cannot be partitioned")
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"all parameters must be on one device; found {places}. Move the module first.")
    return next(iter(devices), torch.device("cpu"))
