"""Which loader a dataset gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from zengine.data.base import Loader
from zengine.data.fetch import Fetching
from zengine.data.indexed import MapLoader
from zengine.data.order import Order
from zengine.data.stream import StreamLoader


def make_loader(
    dataset: Any,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
    drop_last: bool,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    shuffle: bool = True,
) -> Loader:
    """The loader of one of `world_size` ranks that share the data.

    drop_last: leave out the last samples of an epoch that do not fill a micro-batch of all ranks; otherwise
    that micro-batch is filled up from the start of the epoch's order. pin_memory applies where there is a
    CUDA device. TypeError if `dataset` is not a dataset; ValueError if it is smaller than one micro-batch of
    all ranks.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1} (world_size is {world_size}), got {rank}")
    fetching = Fetching(collate_fn=collate_fn or default_collate, num_workers=num_workers, pin_memory=pin_memory)
    if isinstance(dataset, IterableDataset):
        return StreamLoader(
            dataset, micro_batch_size, world_size=world_size, seed=seed, drop_last=drop_last, fetching=fetching
        )
    order = Order(
        num_samples=_length_of(dataset),
        micro_batch_size=micro_batch_size,
        world_size=world_size,
        seed=seed,
        shuffle=shuffle,
    )
    return MapLoader(dataset, order, rank=rank, drop_last=drop_last, fetching=fetching)


def _length_of(dataset: Any) -> int:
    """The number of samples; TypeError for what is not a dataset of indexed samples."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not indexed or isinstance(dataset, (Mapping, str, bytes)):
        raise TypeError(
            f"training data must be a torch Dataset or a sequence with __len__ and __getitem__(index), or a torch "
            f"IterableDataset; got {type(dataset).__name__}. Pass the dataset itself, not a DataLoader or an "
            f"iterator over it; of a dict of splits pass one"
        )
    return len(dataset)
