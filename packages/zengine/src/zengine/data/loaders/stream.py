"""Loader of iterable datasets, whose position only the stream itself can know."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any, final

from torch.utils.data import IterableDataset

from zengine.data.loaders.base import Loader, named_rehearsal, nothing_to_do, whole_numbers
from zengine.data.loaders.fetch import Fetching
from zengine.data.loaders.random_state import generators_untouched

logger = logging.getLogger("zengine.data")


@final
class StreamLoader(Loader):
    """Passes an IterableDataset through; its order and its sharding by rank are its own.

    A dataset with `state_dict` and `load_state_dict` keeps the position (if num_workers is 0; otherwise the copies in
    the workers advance, not the one that is asked).  Without them, a loaded position is reached by reading the stream
    from its beginning and dropping the consumed batches, with a warning: exact if it yields the same again.  An
    iteration without a loaded position starts from the beginning.  The state differs by rank if the datasets do.
    consumed_samples counts in whole batches.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        *,
        world_size: int,
        seed: int,
        drop_last: bool,
        fetching: Fetching,
    ) -> None:
        super().__init__(dataset, batch_size, fetching)
        self._stride = batch_size * world_size
        self._seed = seed  # of the generators in worker processes
        self._drop_last = drop_last
        self._to_drop = 0  # batches that were consumed before this process began
        if fetching.num_workers > 1:
            logger.warning(
                "%s is a stream and is read by %d worker processes: each yields all of it unless it takes its share "
                "by torch.utils.data.get_worker_info(). One worker is right for any stream",
                type(dataset).__name__,
                fetching.num_workers,
            )

    def __len__(self) -> int:
        """Return the batches in an epoch.  Raises TypeError unless the dataset has a length."""
        num_samples = len(self.dataset)
        return num_samples // self.batch_size if self._drop_last else -(-num_samples // self.batch_size)

    def epochs_done(self) -> float:
        try:
            whole = len(self) * self._stride
        except TypeError:
            return float(self.epoch)
        return self.epoch + min(1.0, self.consumed_samples / max(whole, 1))

    def state_dict(self) -> dict[str, Any]:
        """Return {epoch, consumed_samples, dataset}; `dataset` is its own state_dict, {} without position."""
        saved = self.dataset.state_dict() if self._has_position() else {}
        return {"epoch": self.epoch, "consumed_samples": self.consumed_samples, "dataset": saved}

    def _has_position(self) -> bool:
        stateful = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        return stateful and self._fetching.num_workers == 0

    def _open(self) -> Iterator[Any]:
        to_drop, self._to_drop = self._to_drop, 0
        if not self._has_position():
            self.consumed_samples = to_drop * self._stride
        seed = self._seed + self.epoch
        batches = self._fetching.of_stream(self.dataset, self.batch_size, drop_last=self._drop_last, seed=seed)
        with generators_untouched() if to_drop else nullcontext():
            for _ in islice(batches, to_drop):
                pass
        return batches

    def _handed(self) -> None:
        self.consumed_samples += self._stride

    def _ended(self) -> None:
        self.epoch, self.consumed_samples = self.epoch + 1, 0

    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        epoch, consumed = whole_numbers(state, "epoch", "consumed_samples")
        saved, to_drop = state.get("dataset", {}), 0
        place: Callable[[], None] = nothing_to_do
        if saved and self._has_position():
            place = named_rehearsal(self.dataset, saved, "dataset")
        elif consumed:
            to_drop = consumed // self._stride

        def move() -> None:
            place()
            self._to_drop, self.epoch, self.consumed_samples = to_drop, epoch, consumed
            if to_drop:
                self._say_dropped(to_drop)

        return move

    def _say_dropped(self, count: int) -> None:
        logger.warning(
            "%s has no position that could be restored: it is read from its beginning and %d batches are "
            "dropped, which is exact if it yields the same again. With state_dict and load_state_dict, and "
            "num_workers=0, it goes on at once",
            type(self.dataset).__name__,
            count,
        )
