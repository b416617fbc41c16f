"""Weights with their global addresses: what a checkpoint saves, and what it loads into.

A master in memory is both.  One on disk is read when it is saved, piece by piece; and it is loaded into memory first,
from where `Partition.publish` takes it to disk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from zpartition.disk_states import OnDisk
from zpartition.layout import Piece
from zpartition.shard import LazyShard, Shard, cut
from zpartition.sharded import ShardedStorage
from zpartition.storage import BucketStorage

if TYPE_CHECKING:
    from zpartition.partition import Partition

__all__ = ["saved", "to_fill"]

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


def _read(storage: Storage, piece: Piece, part: slice) -> Tensor:
    return _part(storage.home.values(storage.master), piece)[part].clone()


def _part(values: Tensor, piece: Piece) -> Tensor:
    return values[piece.offset : piece.offset + piece.numel]
