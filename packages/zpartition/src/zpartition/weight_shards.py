"""Weights with their global addresses: the shards that a checkpoint saves, and the shards that it loads into.

For a master in memory these are the same.  A master on disk is read piece by piece while it is saved; a load fills
memory, which `Partition.publish` writes to disk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

import zcomm
from zpartition.core import PartitionState
from zpartition.layout.address import LazyShard, Shard, cut
from zpartition.layout.layout import Piece
from zpartition.offload.disk_states import DiskPlacement
from zpartition.weights.sharded import Storage

__all__ = ["refine_masters", "saved_shards", "shards_to_fill"]


def saved_shards(partition: PartitionState) -> Iterator[Shard | LazyShard]:
    """Yield shards to save: masters if there are any, frozen parameters, buffers."""
    partition.check_resident()
    partition.speculative_step.rollback_all()
    for storage in (*partition.storages, *partition.frozen):
        for piece in storage.pieces(partition.rank):
            name, address = piece.slot.name, piece.slot.address
            if isinstance(storage.placement, DiskPlacement):
                read = functools.partial(functools.partial, _read, storage, piece)
                yield from cut(LazyShard, name, address, piece.span, read)
            else:
                part = _part(storage.placement.values(storage.master), piece)
                yield from cut(Shard, name, address, piece.span, part.__getitem__)
    yield from partition.replicated.shards()


def shards_to_fill(partition: PartitionState) -> Iterator[Shard]:
    """Yield the same addresses with memory to load into; `Partition.publish` makes the loaded values current."""
    partition.check_resident()
    partition.speculative_step.rollback_all()
    for storage in (*partition.storages, *partition.frozen):
        placement = storage.placement
        values = placement.stage() if isinstance(placement, DiskPlacement) else placement.values(storage.master)
        for piece in storage.pieces(partition.rank):
            part = _part(values, piece)
            yield from cut(Shard, piece.slot.name, piece.slot.address, piece.span, part.__getitem__)
    yield from partition.replicated.shards()


def refine_masters(partition: PartitionState, given: Mapping[str, Tensor]) -> bool:
    """Copy values of a wider dtype than the module's weights into masters; returns whether `given` has any.

    A collective; rank 0's values are used.
    """
    wide = [
        name
        for name, param in partition.params.items()
        if name in given and given[name].is_floating_point() and given[name].dtype.itemsize > param.dtype.itemsize
    ]
    wide = zcomm.all_gather_object(wide, partition.group)[0]
    if not wide:
        return False
    places: dict[str, list[tuple[Tensor, Piece]]] = {}
    holders = {s.name: partition.ranks.groups_for(bucket).world for bucket, s in partition.layout.slots()}
    for storage in partition.storages:
        values = (
            storage.placement.stage()
            if isinstance(storage.placement, DiskPlacement)
            else storage.placement.values(storage.master)
        )
        for piece in storage.pieces(partition.rank):
            places.setdefault(piece.slot.name, []).append((_part(values, piece), piece))
    for name in wide:
        values = given.get(name, torch.empty(partition.params[name].shape)).detach()
        whole = values.to(partition.device, torch.float32, copy=True).reshape(-1)
        zcomm.broadcast(whole, holders[name], source=0, label=f"values of {name}")
        for part, piece in places.get(name, ()):
            part.copy_(whole[slice(*piece.span)])
    return True


def _read(storage: Storage, piece: Piece, part: slice) -> Tensor:
    return _part(storage.placement.values(storage.master), piece)[part].clone()


def _part(values: Tensor, piece: Piece) -> Tensor:
    return values[piece.offset : piece.offset + piece.numel]
