"""Weights with their global addresses: what a checkpoint saves, and what it loads into.

A master in memory is both.  One on disk is read when it is saved, piece by piece; and it is loaded into memory first,
from where `Partition.publish` takes it to disk.
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

__all__ = ["refine", "saved", "to_fill"]


def saved(partition: PartitionState) -> Iterator[Shard | LazyShard]:
    """Masters where there are any, frozen parameters, buffers; to be read."""
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


def to_fill(partition: PartitionState) -> Iterator[Shard]:
    """The same addresses with memory to be read into; `Partition.publish` makes it count."""
    partition.check_resident()
    partition.speculative_step.rollback_all()
    for storage in (*partition.storages, *partition.frozen):
        placement = storage.placement
        values = placement.stage() if isinstance(placement, DiskPlacement) else placement.values(storage.master)
        for piece in storage.pieces(partition.rank):
            part = _part(values, piece)
            yield from cut(Shard, piece.slot.name, piece.slot.address, piece.span, part.__getitem__)
    yield from partition.replicated.shards()


def refine(partition: PartitionState, given: Mapping[str, Tensor]) -> bool:
    """Copy values of a wider dtype than the module's weights into masters; returns whether `given` has any."""
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
