"""Loader of indexed datasets: any position is a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import attrs

from zengine.data.loaders.base import Loader, check_below, whole_numbers
from zengine.data.loaders.fetch import Fetching
from zengine.data.order.order import Order


@final
class MapLoader(Loader):
    """Loads a dataset with a length and an index.

    Invariant: at least one batch is left in the epoch at the position.
    """

    def __init__(self, dataset: Any, order: Order, *, rank: int, drop_last: bool, fetching: Fetching) -> None:
        super().__init__(dataset, order.micro_batch_size, fetching)
        self._order = order
        self._rank = rank
        self._drop_last = drop_last

    def fingerprint(self) -> list[str]:
        return [f"{self._order.num_samples} samples"]

    def __len__(self) -> int:
        return self._order.num_batches(drop_last=self._drop_last)

    def epochs_done(self) -> float:
        return self.epoch + min(1.0, self.consumed_samples / self._order.num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return {seed, epoch, consumed_samples, num_samples, shuffle}; equal on every rank and in every world."""
        return {
            "seed": self._order.seed,
            "epoch": self.epoch,
            "consumed_samples": self.consumed_samples,
            "num_samples": self._order.num_samples,
            "shuffle": self._order.shuffle,
        }

    def _open(self) -> Iterator[Any]:
        tickets = self._order.tickets(
            self._rank, epoch=self.epoch, consumed=self.consumed_samples, drop_last=self._drop_last
        )
        return self._fetching.of_tickets(self.dataset, tickets, self._order.seed)

    def _handed(self) -> None:
        self.consumed_samples += self._order.stride
        self._enter_next_epoch_if_done()

    def _ended(self) -> None: ...

    def _enter_next_epoch_if_done(self) -> None:
        if self._order.num_batches(drop_last=self._drop_last, consumed=self.consumed_samples) <= 0:
            self.epoch, self.consumed_samples = self.epoch + 1, 0

    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Keep the saved seed, which made the order that the position belongs to.

        With other ranks or another micro-batch size the epoch continues at the same sample.  If fewer samples are
        left than one micro-batch of all ranks and drop_last is set, they are dropped.
        """
        seed, epoch, consumed = whole_numbers(state, "seed", "epoch", "consumed_samples")
        self._check_same_data(state)
        check_below("consumed_samples", consumed, self._order.num_samples, "samples of an epoch")

        def move() -> None:
            self._order = attrs.evolve(self._order, seed=seed)
            self.epoch, self.consumed_samples = epoch, consumed
            self._enter_next_epoch_if_done()

        return move

    def _check_same_data(self, state: Mapping[str, Any]) -> None:
        (num_samples,) = whole_numbers(state, "num_samples")
        if num_samples != self._order.num_samples:
            raise ValueError(
                f"loader state: num_samples: the position was saved in a dataset of {num_samples} samples, this one "
                f"has {self._order.num_samples}, so the same place would be another sample. Use the same dataset, or "
                f"do not load the loader's state and begin a new epoch"
            )
        shuffle = state.get("shuffle", True)
        if not isinstance(shuffle, bool):
            raise ValueError(f"loader state: shuffle must be True or False, got {shuffle!r}")
        if shuffle != self._order.shuffle:
            raise ValueError(
                f"loader state: the position was saved with shuffle={not self._order.shuffle}, this loader has "
                f"shuffle={self._order.shuffle}. Build the loader as it was"
            )
