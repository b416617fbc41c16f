"""Fetching: from tickets to batches by torch's DataLoader, isolated from the global RNG.

A DataLoader without its own generator draws a seed from torch's global RNG per pass, so the number of passes would
change the run; ours has a generator.  In worker processes a dataset's random draws (augmentation) would depend on the
batches that the worker made before, which no checkpoint can restore.  So each ticket reseeds the worker: the same
batch results for any number of workers and after any interruption.  Without workers the draws are the main process's,
whose generators a checkpoint saves; but ranks that share a copy of the model and make the same samples draw by ticket
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from zengine.data.loaders.delivery import as_they_come
from zengine.data.loaders.random_state import drawn_alike, seed_generators
from zengine.data.order.order import Ticket

Collate = Callable[[list[Any]], Any]
Delivery = Callable[[Iterator[Any]], Iterator[Any]]


@attrs.frozen(kw_only=True)
class Fetching:
    """Settings that turn samples into batches."""

    collate_fn: Collate = default_collate  # a list of samples to a batch
    num_workers: int = 0  # processes that fetch ahead; 0 fetches in this one
    pin_memory: bool = False  # page-locked batches, for copies that overlap with computation
    deliver: Delivery = as_they_come  # on their way to the caller; see `delivery`
    shared_by: tuple[int, ...] = ()  # the number of the copy whose ranks make the same samples; (): each its own

    def of_tickets(self, dataset: Any, tickets: Iterable[Ticket], seed: int) -> Iterator[Any]:
        """Return one batch per ticket, in order.  `dataset` has `__getitem__` and perhaps `__getitems__`."""
        view = _TicketView(dataset, seed, bool(self.shared_by))
        return self._open(view, seed, batch_size=None, sampler=tickets, collate_fn=self.collate_fn)

    def of_stream(
        self, dataset: IterableDataset[Any], batch_size: int, *, drop_last: bool, seed: int
    ) -> Iterator[Any]:
        """Return batches of an IterableDataset, in its own order."""
        options = {"batch_size": batch_size, "drop_last": drop_last, "collate_fn": self.collate_fn}
        return self._open(dataset, seed, **options)

    def _open(self, dataset: Dataset[Any], seed: int, **options: Any) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        pin_memory = self.pin_memory and torch.cuda.is_available()
        loader = DataLoader(
            dataset, num_workers=self.num_workers, pin_memory=pin_memory, generator=generator, **options
        )
        batches = iter(loader)
        return self.deliver(drawn_alike(batches, seed, *self.shared_by) if self.shared_by else batches)


class _TicketView(Dataset[list[Any]]):
    """Dataset of batches: indexed by a ticket, it returns the ticket's samples."""

    def __init__(self, dataset: Any, seed: int, is_shared: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._is_shared = is_shared

    def __getitem__(self, ticket: Ticket) -> list[Any]:
        if self._is_shared or get_worker_info() is not None:
            seed_generators(self._seed, ticket.epoch, ticket.begin)
        indices = list(ticket.indices)
        many = getattr(self._dataset, "__getitems__", None)  # a dataset may read several samples at once
        return many(indices) if many is not None else [self._dataset[index] for index in indices]
