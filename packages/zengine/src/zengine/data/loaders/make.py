"""`make_loader`: a loader in one call, for custom training loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from zengine.data.loaders.base import Loader
from zengine.data.loaders.feed import Feed
from zengine.data.loaders.fetch import Fetching


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
    """Return the loader of one of `world_size` ranks that share the data.

    drop_last: drop the last samples of an epoch that do not fill a micro-batch of all ranks; otherwise that
    micro-batch is filled up from the start of the epoch's order.  pin_memory applies if there is a CUDA device.
    Raises TypeError if `dataset` is not a dataset, and ValueError if it is smaller than one micro-batch of all ranks.
    """
    fetching = Fetching(collate_fn=collate_fn or default_collate, num_workers=num_workers, pin_memory=pin_memory)
    feed = Feed(
        micro_batch_size=micro_batch_size,
        rank=rank,
        world_size=world_size,
        seed=seed,
        drop_last=drop_last,
        fetching=fetching,
    )
    return feed.plain(dataset, shuffle=shuffle)
