"""Weights with their global addresses: what a checkpoint saves, and what it loads into.

A master in memory is both.  One on disk is read when it is saved, piece by piece; and it is loaded into memory first,
from where `Partition.publish` takes it to disk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import zcomm
from zpartition.disk_states import OnDisk
from zpartition.layout import Piece
from zpartition.shard import LazyShard, Shard, cut
from zpartition.sharded import ShardedStorage
from zpartition.storage import BucketStorage

if TYPE_CHECKING:
    from zpartition.partition import Partition

__all__ = ["refine", "saved", "to_fill"]

Storage = BucketStorage | ShardedStorage


def saved(partition: Partition) -> Iterator[Shard | LazyShard]:
    """Masters where there are any, frozen parameters, buffers; to be read."""
    partition.refuse_parked()
    partition.ahead.retract_all()
    for storage in (*partition.storages, *partition.frozen):
        for piece in storage.pieces(partition.rank):
            name, address = piece.slot.name, piece.slot.address
            if isinstance(storage.home, OnDisk):
                read = functools.partial(functools.partial, _read, storage, piece)
                yield from cut(LazyShard, name, address, piece.span, read)
            else:
                part = _part(storage.home.values(storage.master), piece)
                yield from cut(Shard, name, address, piece.span, part.__getitem__)
    yield from partition.bystanders.shards()


def to_fill(partition: Partition) -> Iterator[Shard]:
    """The same addresses with memory to be read into; `Partition.publish` makes it count."""
    partition.refuse_parked()
    partition.ahead.retract_all()
    for storage in (*partition.storages, *partition.frozen):
        home = storage.home
        values = home.stage() if isinstance(home, OnDisk) else home.values(storage.master)
        for piece in storage.pieces(partition.rank):
            part = _part(values, piece)
            yield from cut(Shard, piece.slot.name, piece.slot.address, piece.span, part.__getitem__)
    yield from partition.bystanders.shards()


def refine(partition: Partition, given: Mapping[str, Tensor]) -> None:
    """Give masters the values of `given` that say more than the module's weights can hold; see `Partition.refine`."""
    wide = [
        name
        for name, param in partition.params.items()
        if name in given and given[name].is_floating_point() and given[name].dtype.itemsize > param.dtype.itemsize
    ]
    wide = zcomm.exchange(wide, partition.group)[0]
    if not wide:
        return
    places: dict[str, list[tuple[Tensor, Piece]]] = {}
    holders = {s.name: partition.ranks.having(bucket).world for bucket, s in partition.layout.slots()}
    for storage in partition.storages:
        values = storage.home.stage() if isinstance(storage.home, OnDisk) else storage.home.values(storage.master)
        for piece in storage.pieces(partition.rank):
            places.setdefault(piece.slot.name, []).append((_part(values, piece), piece))
    for name in wide:
        values = given.get(name, torch.empty(partition.params[name].shape)).detach()
        whole = values.to(partition.device, torch.float32, copy=True).reshape(-1)
        zcomm.broadcast(whole, holders[name], source=0, label=f"values of {name}")
        for part, piece in places.get(name, ()):
            part.copy_(whole[slice(*piece.span)])
    partition.publish()


def _read(storage: Storage, piece: Piece, part: slice) -> Tensor:
    return _part(storage.home.values(storage.master), piece)[part].clone()


def _part(values: Tensor, piece: Piece) -> Tensor:
    return values[piece.offset : piece.offset + piece.numel]
