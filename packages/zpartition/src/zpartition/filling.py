"""Values that arrive tensor by tensor, put where a partition keeps them: each rank keeps its part alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zpartition.deferred import Deferred
from zpartition.layout import Slot
from zpartition.sharded import ShardedStorage
from zpartition.storage import BucketStorage

__all__ = ["fill_storages"]

Storage = BucketStorage | ShardedStorage


def fill_storages(deferred: Deferred, storages: Sequence[Storage], group: ProcessGroup | None) -> None:
    """Give the storages, and what they do not hold of the module, the values that its construction has deferred."""
    places: dict[str, tuple[Storage, Slot]] = {}
    for storage in storages:
        places.update({slot.name: (storage, slot) for slot in storage.bucket.slots})

    def take(name: str, values: Tensor) -> None:
        if name not in places:
            tensor = deferred.tensors[name]
            tensor.data = values.to(tensor.device, copy=True)
            return
        storage, slot = places[name]
        if isinstance(storage, ShardedStorage):
            storage.take_from(slot, values)
        else:
            storage.flat[slot.offset : slot.end].view(slot.shape).copy_(values)

    with torch.no_grad():
        deferred.fill(take, group)
    for storage in storages:
        storage.refresh_master()
