"""Loader of iterable datasets: only the stream itself knows its position."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any, final

from torch.utils.data import IterableDataset

from zengine.data.loaders.base import Loader, do_nothing, prepare_restore, read_counts
from zengine.data.loaders.fetch import BatchFetcher, preserve_generators

logger = logging.getLogger("zengine.data")


@final
class StreamLoader(Loader):
    """Passes an IterableDataset through; its order and its sharding by rank are its own.

    A dataset with `state_dict` and `load_state_dict` keeps the position if num_workers is 0; with workers, only their
    copies of the dataset advance.  Otherwise a loaded position is reached by reading the stream from its beginning
    and dropping the consumed batches, with a warning: exact if the stream repeats.  An iteration without a loaded
    position starts from the beginning.  The state differs by rank if the datasets do.  `consumed_samples` counts
    whole batches.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        *,
        world_size: int,
        seed: int,
        drop_last: bool,
        fetcher: BatchFetcher,
    ) -> None:
        super().__init__(dataset, batch_size, fetcher)
        self._stride = batch_size * world_size
        self._seed = seed  # seeds the generators of worker processes
        self._drop_last = drop_last
        self._to_drop = 0  # batches consumed before the loaded position
        if fetcher.num_workers > 1:
            logger.warning(
                "%s is a stream read by %d worker processes: each worker yields the whole stream unless the dataset "
                "shards itself with torch.utils.data.get_worker_info(). num_workers=1 is right for any stream",
                type(dataset).__name__,
                fetcher.num_workers,
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
        """Return {epoch, consumed_samples, dataset}; `dataset` is the dataset's state_dict, {} if it has none."""
        saved = self.dataset.state_dict() if self._has_position() else {}
        return {"epoch": self.epoch, "consumed_samples": self.consumed_samples, "dataset": saved}

    def _has_position(self) -> bool:
        stateful = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        return stateful and self._fetcher.num_workers == 0

    def _open(self) -> Iterator[Any]:
        to_drop, self._to_drop = self._to_drop, 0
        if not self._has_position():
            self.consumed_samples = to_drop * self._stride
        seed = self._seed + self.epoch
        batches = self._fetcher.fetch_stream(self.dataset, self.batch_size, drop_last=self._drop_last, seed=seed)
        with preserve_generators() if to_drop else nullcontext():
            for _ in islice(batches, to_drop):
                pass
        return batches

    def _advance(self) -> None:
        self.consumed_samples += self._stride

    def _finish_epoch(self) -> None:
        self.epoch, self.consumed_samples = self.epoch + 1, 0

    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        epoch, consumed = read_counts(state, "epoch", "consumed_samples")
        saved, to_drop = state.get("dataset", {}), 0
        restore: Callable[[], None] = do_nothing
        if saved and self._has_position():
            restore = prepare_restore(self.dataset, saved, "dataset")
        elif consumed:
            to_drop = consumed // self._stride

        def move() -> None:
            restore()
            self._to_drop, self.epoch, self.consumed_samples = to_drop, epoch, consumed
            if to_drop:
                self._log_dropped(to_drop)

        return move

    def _log_dropped(self, count: int) -> None:
        logger.warning(
            "%s has no position to restore: the loader reads it from its beginning and drops %d batches, which is "
            "exact if the stream repeats. With state_dict, load_state_dict and num_workers=0 it resumes at once",
            type(self.dataset).__name__,
            count,
        )
