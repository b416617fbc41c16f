"""Feed: the loader settings of one rank, and the loaders made from them.

feed = Feed(micro_batch_size=4, rank=0, world_size=1, seed=1)
loader = feed.plain(dataset)                            # or .sampled, .curriculum, .packed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate

from zengine.data.files.metrics import MetricError
from zengine.data.loaders.base import Loader
from zengine.data.loaders.curriculum import CurriculumLoader
from zengine.data.loaders.delivery import delivery_to
from zengine.data.loaders.fetch import Fetching
from zengine.data.loaders.indexed import MapLoader
from zengine.data.loaders.packed import PackedLoader
from zengine.data.loaders.sampled import SampledLoader
from zengine.data.loaders.stream import StreamLoader
from zengine.data.order.curriculum import CurriculumWalk, Limit
from zengine.data.order.order import Order
from zengine.data.order.packing import PackedOrder, Packing


@attrs.frozen(kw_only=True)
class Feed:
    """Settings shared by all loaders of a rank."""

    micro_batch_size: int  # samples of this rank in a micro-step
    rank: int = 0  # among the ranks that share the data
    world_size: int = 1  # so many
    accumulation: int = 1  # micro-steps of an optimizer step
    seed: int = 1234
    drop_last: bool = False  # leave out the rest of an epoch; else it is filled up
    fetching: Fetching = attrs.field(factory=Fetching)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must be in 0..{self.world_size - 1} (world_size is {self.world_size}), got {self.rank}"
            )

    def plain(self, dataset: Any, *, shuffle: bool = True) -> Loader:
        """Load all samples, reshuffled each epoch; an IterableDataset is passed through.

        Raises:
            TypeError: `dataset` is not a dataset.
            ValueError: it is smaller than one micro-batch of all ranks.
        """
        if not isinstance(dataset, IterableDataset):
            order = self._order(dataset, shuffle=shuffle)
            return MapLoader(dataset, order, rank=self.rank, drop_last=self.drop_last, fetching=self.fetching)
        return StreamLoader(
            dataset,
            self.micro_batch_size,
            world_size=self.world_size,
            seed=self.seed,
            drop_last=self.drop_last,
            fetching=self.fetching,
        )

    def sampled(self, dataset: Any, sampler: Iterable[int]) -> Loader:
        """Load in the order of a sampler, which yields the samples of this rank."""
        return SampledLoader(
            dataset,
            sampler,
            self.micro_batch_size,
            world_size=self.world_size,
            seed=self.seed,
            drop_last=self.drop_last,
            fetching=self.fetching,
        )

    def curriculum(self, dataset: Any, limits: tuple[Limit, ...], *, num_epochs: int = 1) -> Loader:
        """Load the samples that are easy enough for the step; an iteration lasts `num_epochs`.

        Raises:
            MetricError: a metric is not of this dataset.
        """
        order = self._order(dataset, shuffle=True)
        for limit in limits:
            limit.index.check_covers(order.num_samples)
        walk = CurriculumWalk(order=order, limits=limits, accumulation=self.accumulation)
        return CurriculumLoader(dataset, walk, rank=self.rank, num_epochs=num_epochs, fetching=self.fetching)

    def packed(self, dataset: Any, lengths: NDArray[Any], packing: Packing) -> Loader:
        """Load micro-batches of as many samples as fit.

        Raises:
            MetricError: `lengths` are not of this dataset, or there is too little for one step.
        """
        num_samples = self.length_of(dataset)
        if lengths.shape != (num_samples,):
            raise MetricError(f"{lengths.shape} lengths do not belong to a dataset of {num_samples} samples")
        order = PackedOrder(
            lengths=lengths,
            packing=packing,
            replicas=self.world_size,
            accumulation=self.accumulation,
            seed=self.seed,
            drop_last=self.drop_last,
        )
        return PackedLoader(
            dataset, order, rank=self.rank, micro_batch_size=self.micro_batch_size, fetching=self.fetching
        )

    def _order(self, dataset: Any, *, shuffle: bool) -> Order:
        return Order(
            num_samples=self.length_of(dataset),
            micro_batch_size=self.micro_batch_size,
            world_size=self.world_size,
            seed=self.seed,
            shuffle=shuffle,
        )

    @staticmethod
    def length_of(dataset: Any) -> int:
        """Return the number of samples.  Raises TypeError unless the dataset is indexed."""
        if not is_indexed(dataset):
            raise TypeError(
                "training data must be a torch Dataset or a sequence with __len__ and __getitem__(index), or a "
                f"torch IterableDataset; got {type(dataset).__name__}. Pass the dataset itself, not a DataLoader or "
                f"an iterator over it; of a dict of splits pass one"
            )
        return len(dataset)


def is_indexed(dataset: Any) -> bool:
    """Return True if it has a length and an index, and is neither a mapping nor text."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return indexed and not isinstance(dataset, (Mapping, str, bytes))


def fetching_of(
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int,
    pin_memory: bool,
    device: torch.device,
    prefetch: int,
    shared_by: tuple[int, ...] = (),
) -> Fetching:
    """Return the fetching of batches on `device`, `prefetch` of them ahead (0: they stay on the host)."""
    moves = device.type == "cuda" and prefetch > 0
    return Fetching(
        collate_fn=collate_fn or default_collate,
        num_workers=num_workers,
        pin_memory=pin_memory or moves,
        deliver=delivery_to(device, num_ahead=prefetch, num_workers=num_workers),
        shared_by=shared_by,
    )
