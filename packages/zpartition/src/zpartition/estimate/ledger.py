"""The bytes that a partition holds on this rank, by owner, counted from live tensors.

Owners without a prefix are on the module's device.  What an offload has moved is named with its place: "host states",
"pinned masters" (page-locked, which the operating system cannot take back), "disk states".  `plan` (memory.py)
names the same owners before anything is allocated.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from torch import Tensor

from zpartition.core import PartitionState
from zpartition.layout.policy import Tier
from zpartition.memory.placement import HostParams, ParamPlacement
from zpartition.state.counts import is_large
from zpartition.weights.sharded import ShardedStorage

__all__ = ["count"]


def count(partition: PartitionState, moved: Mapping[str, int]) -> dict[str, int]:
    """Bytes on this rank by owner: weights between steps (frozen ones too), separate masters, reduced gradients,
    optimizer states, buffers of gradients that travel and of gathered units; then what is elsewhere, if anything is.
    """
    own = set(map(id, partition.owned()))
    whole = sum(param.nbytes for param in partition.module.parameters() if id(param) not in own)
    found: collections.Counter[str] = collections.Counter()
    for storage in partition.storages:
        if not storage.shares_master and not _is_hollow(storage.master):
            found[_named("masters", storage.placement.tier, storage.master)] += storage.master.nbytes
    for storage in (*partition.storages, *partition.frozen):
        if isinstance(storage, ShardedStorage) and storage.param_placement.tier is not Tier.DEVICE:
            found[f"{_place(storage.param_placement)} parameters"] += storage.param_placement.num_bytes
    for gradient, storage in zip(partition.reducer.gradients, partition.storages):
        if gradient.store is not None:
            tier = Tier.DEVICE if storage.placement.tier is Tier.DEVICE else Tier.HOST
            found[_named("accumulators", tier, gradient.store)] += gradient.store.nbytes
    tiers = {id(storage.master): storage.placement.tier for storage in partition.storages}
    entries = partition.optimizer.state.items() if partition.optimizer is not None else ()
    for tensor, entry in entries:
        for key, value in entry.items():
            if is_large(key, value):
                found[_named("states", tiers.get(id(tensor), Tier.DEVICE), value)] += value.nbytes
    found.update(moved)
    found["host rollback"] = partition.speculative_step.num_bytes
    resting = sum(storage.persistent_bytes for storage in (*partition.storages, *partition.frozen))
    device = {
        "parameters": whole + resting,
        "masters": found.pop("masters", 0),
        "accumulators": found.pop("accumulators", 0),
        "states": found.pop("states", 0),
        "buckets": partition.reducer.pool.total_bytes,
        "gathered units": partition.unsharder.pool.total_bytes,
        "secondary shards": partition.unsharder.kept_bytes,
    }
    return {**device, **{owner: size for owner, size in sorted(found.items()) if size}}


def _is_hollow(tensor: Tensor) -> bool:
    """Return whether it is one number in many places: on disk, or parked."""
    return tensor.numel() > 1 and not any(tensor.stride())


def _place(param_placement: ParamPlacement) -> str:
    if isinstance(param_placement, HostParams):
        return "pinned" if param_placement.host.is_pinned() else "host"
    return "disk"


def _named(owner: str, tier: Tier, tensor: Tensor) -> str:
    """The owner with the place of one of its tensors."""
    if tier is Tier.DEVICE:
        return owner
    return f"{'pinned' if tensor.is_pinned() else 'host'} {owner}"
