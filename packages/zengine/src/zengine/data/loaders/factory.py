"""Loader factory: the data settings of one rank, and the loaders made from them.

factory = LoaderFactory(micro_batch_size=4, rank=0, world_size=1, seed=1)
loader = factory.plain(dataset)                     # or .sampled, .curriculum, .packed
loader = make_loader(dataset, ...)                  # `plain` in one call, for custom training loops
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, default_collate

from zengine.data.loaders.base import Loader
from zengine.data.loaders.curriculum import CurriculumLoader
from zengine.data.loaders.fetch import BatchFetcher, make_prefetcher
from zengine.data.loaders.indexed import MapLoader, SampledLoader, UnevenLoader
from zengine.data.loaders.packed import PackedLoader
from zengine.data.loaders.stream import StreamLoader
from zengine.data.metrics import MetricError
from zengine.data.order.curriculum import CurriculumOrder, Limit
from zengine.data.order.order import Order
from zengine.data.order.packing import PackedOrder, Packing
from zengine.data.order.uneven import UnevenStep


@attrs.frozen(kw_only=True)
class LoaderFactory:
    """Settings shared by all loaders of a rank.  Raises ValueError for a rank outside of the world."""

    micro_batch_size: int  # samples of this rank in a micro-step
    rank: int = 0  # among the ranks that share the data
    world_size: int = 1  # number of these ranks
    accumulation: int = 1  # micro-steps of an optimizer step
    seed: int = 1234
    drop_last: bool = False  # drop the incomplete last micro-step of an epoch; otherwise pad it
    uneven: tuple[UnevenStep, ...] = ()  # one if ranks have different numbers of samples
    fetcher: BatchFetcher = attrs.field(factory=BatchFetcher)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must be in 0..{self.world_size - 1} (world_size is {self.world_size}), got {self.rank}"
            )

    def plain(self, dataset: Any, *, shuffle: bool = True) -> Loader:
        """Load all samples, reshuffled each epoch; an IterableDataset keeps its own order.

        Raises:
            TypeError: `dataset` is not a dataset.
            ValueError: `dataset` is smaller than one micro-batch of all ranks.
        """
        for step in self.uneven:
            self._check_even("an IterableDataset", isinstance(dataset, IterableDataset))
            num_samples = self.length_of(dataset)
            order = Order(num_samples=num_samples, micro_batch_size=1, seed=self.seed, shuffle=shuffle)
            return UnevenLoader(dataset, order, step, rank=self.rank, drop_last=self.drop_last, fetcher=self.fetcher)
        if not isinstance(dataset, IterableDataset):
            order = self._order(dataset, shuffle=shuffle)
            return MapLoader(dataset, order, rank=self.rank, drop_last=self.drop_last, fetcher=self.fetcher)
        return StreamLoader(
            dataset,
            self.micro_batch_size,
            world_size=self.world_size,
            seed=self.seed,
            drop_last=self.drop_last,
            fetcher=self.fetcher,
        )

    def sampled(self, dataset: Any, sampler: Iterable[int]) -> Loader:
        """Load in the order of a sampler, which yields the samples of this rank."""
        self._check_even("a sampler", True)
        return SampledLoader(
            dataset,
            sampler,
            self.micro_batch_size,
            world_size=self.world_size,
            seed=self.seed,
            drop_last=self.drop_last,
            fetcher=self.fetcher,
        )

    def curriculum(self, dataset: Any, limits: tuple[Limit, ...], *, num_epochs: int = 1) -> Loader:
        """Load the samples that the limits admit at each step; an iteration lasts `num_epochs`.

        Raises:
            MetricError: a metric belongs to another dataset.
        """
        order = self._order(dataset, shuffle=True)
        for limit in limits:
            limit.index.check_covers(order.num_samples)
        curriculum = CurriculumOrder(base=order, limits=limits, accumulation=self.accumulation)
        return CurriculumLoader(dataset, curriculum, rank=self.rank, num_epochs=num_epochs, fetcher=self.fetcher)

    def packed(self, dataset: Any, lengths: NDArray[Any], packing: Packing) -> Loader:
        """Load micro-batches of as many samples as fit into the token budget.

        Raises:
            MetricError: `lengths` belong to another dataset, or the dataset is too small for one step.
        """
        num_samples = self.length_of(dataset)
        if lengths.shape != (num_samples,):
            raise MetricError(
                f"lengths has shape {lengths.shape}; a dataset of {num_samples} samples needs ({num_samples},)"
            )
        order = PackedOrder(
            lengths=lengths,
            packing=packing,
            replicas=self.world_size,
            accumulation=self.accumulation,
            seed=self.seed,
            drop_last=self.drop_last,
        )
        return PackedLoader(
            dataset, order, rank=self.rank, micro_batch_size=self.micro_batch_size, fetcher=self.fetcher
        )

    def _check_even(self, what: str, is_given: bool) -> None:
        """Raise ValueError if `what` would choose the samples of ranks whose shares differ in size."""
        if self.uneven and is_given:
            step = self.uneven[0]
            raise ValueError(
                f"a step of {step.batch} samples does not divide by {step.world_size} ranks, so each rank has a "
                f"share of its own size, and {what} yields batches of one size. Pass an indexed dataset, or start a "
                f"number of ranks that divides {step.batch}"
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
                "an iterator over it; of a dict of splits, pass one split"
            )
        return len(dataset)


def is_indexed(dataset: Any) -> bool:
    """Return True if `dataset` has __len__ and __getitem__, and is neither a mapping nor text."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return indexed and not isinstance(dataset, (Mapping, str, bytes))


def make_fetcher(
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int,
    pin_memory: bool,
    device: torch.device,
    prefetch: int,
    shared_seed: tuple[int, ...] = (),
) -> BatchFetcher:
    """Return a fetcher that moves batches to `device`, `prefetch` of them ahead (0: batches stay on the host)."""
    moves = device.type == "cuda" and prefetch > 0
    return BatchFetcher(
        collate_fn=collate_fn or default_collate,
        num_workers=num_workers,
        pin_memory=pin_memory or moves,
        prefetcher=make_prefetcher(device, num_ahead=prefetch, num_workers=num_workers),
        shared_seed=shared_seed,
    )


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
    """Return the loader of `rank`, one of `world_size` ranks that share the data.

    drop_last: drop the samples at the end of an epoch that do not fill a micro-batch of all ranks; otherwise the
    start of the epoch's order fills that micro-batch.  pin_memory: applies if there is a CUDA device.
    Raises TypeError if `dataset` is not a dataset, and ValueError if it is smaller than one micro-batch of all ranks.
    """
    fetcher = BatchFetcher(collate_fn=collate_fn or default_collate, num_workers=num_workers, pin_memory=pin_memory)
    factory = LoaderFactory(
        micro_batch_size=micro_batch_size,
        rank=rank,
        world_size=world_size,
        seed=seed,
        drop_last=drop_last,
        fetcher=fetcher,
    )
    return factory.plain(dataset, shuffle=shuffle)
