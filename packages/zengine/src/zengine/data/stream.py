"""The loader of iterable datasets: a stream knows its own position, or nobody does."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, final

from torch.utils.data import IterableDataset

from zengine.data.base import Loader, whole_numbers
from zengine.data.fetch import Fetching

logger = logging.getLogger("zengine.data")


@final
class StreamLoader(Loader):
    """Over an IterableDataset, passed through as it is: its order and its sharding by rank are its own.

    There is a position only if the dataset has `state_dict` and `load_state_dict` (and num_workers is 0, as
    otherwise the copies in the workers move, not the one that could be asked). Without, every iteration
    starts from the beginning of the stream, and loading a state in its middle says so in a warning. The state
    differs by rank if the datasets do. consumed_samples counts in whole batches.
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

    def __len__(self) -> int:
        """TypeError unless the dataset has a length."""
        num_samples = len(self.dataset)
        return num_samples // self.batch_size if self._drop_last else -(-num_samples // self.batch_size)

    def epochs_done(self) -> float:
        try:
            whole = len(self) * self._stride
        except TypeError:
            return float(self.epoch)
        return self.epoch + min(1.0, self.consumed_samples / max(whole, 1))

    def state_dict(self) -> dict[str, Any]:
        """{epoch, consumed_samples, dataset}; `dataset` is what its own state_dict says, {} without position."""
        saved = self.dataset.state_dict() if self._has_position() else {}
        return {"epoch": self.epoch, "consumed_samples": self.consumed_samples, "dataset": saved}

    def _has_position(self) -> bool:
        stateful = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")
        return stateful and self._fetching.num_workers == 0

    def _open(self) -> Iterator[Any]:
        if not self._has_position():
            self.consumed_samples = 0
        seed = self._seed + self.epoch
        return self._fetching.of_stream(self.dataset, self.batch_size, drop_last=self._drop_last, seed=seed)

    def _handed(self) -> None:
        self.consumed_samples += self._stride

    def _ended(self) -> None:
        self.epoch, self.consumed_samples = self.epoch + 1, 0

    def _load(self, state: Mapping[str, Any]) -> None:
        epoch, consumed = whole_numbers(state, "epoch", "consumed_samples")
        saved = state.get("dataset", {})
        if saved and self._has_position():
            self.dataset.load_state_dict(saved)
        elif consumed:
            logger.warning(
                "%s has no position that could be restored: it starts from its beginning, although %d samples of "
                "it were consumed. Give it state_dict and load_state_dict, and use num_workers=0",
                type(self.dataset).__name__,
                consumed,
            )
            consumed = 0
        self.epoch, self.consumed_samples = epoch, consumed
