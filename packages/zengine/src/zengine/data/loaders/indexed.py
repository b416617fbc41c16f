"""Loaders of indexed datasets: in our order (`MapLoader`), or in the order of a user's sampler (`SampledLoader`).

In our order any position is a number: the samples that all ranks have consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, final

import attrs
import numpy as np

from zengine.data.loaders.base import Loader, check_below, do_nothing, prepare_restore, read_counts
from zengine.data.loaders.fetch import BatchFetcher
from zengine.data.order.order import BatchIndices, Order
from zengine.data.order.uneven import UnevenStep


class MapLoader(Loader):
    """Loads a dataset with a length and an index.

    Invariant: at least one batch is left in the epoch at the position.
    """

    def __init__(self, dataset: Any, order: Order, *, rank: int, drop_last: bool, fetcher: BatchFetcher) -> None:
        super().__init__(dataset, order.micro_batch_size, fetcher)
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
        batches = self._order.batches(
            self._rank, epoch=self.epoch, consumed=self.consumed_samples, drop_last=self._drop_last
        )
        return self._fetcher.fetch_batches(self.dataset, batches, self._order.seed)

    def _advance(self) -> None:
        self.consumed_samples += self._order.stride
        self._enter_next_epoch_if_done()

    def _finish_epoch(self) -> None: ...

    def _enter_next_epoch_if_done(self) -> None:
        if self._order.num_batches(drop_last=self._drop_last, consumed=self.consumed_samples) <= 0:
            self.epoch, self.consumed_samples = self.epoch + 1, 0

    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Prepare the saved position and seed; the seed determines the order.

        With another world size or micro-batch size the epoch continues at the same sample.  If fewer samples are
        left than one micro-batch of all ranks and drop_last is set, they are dropped.
        """
        seed, epoch, consumed = read_counts(state, "seed", "epoch", "consumed_samples")
        self._check_same_data(state)
        check_below("consumed_samples", consumed, self._order.num_samples, "samples of an epoch")

        def move() -> None:
            self._order = attrs.evolve(self._order, seed=seed)
            self.epoch, self.consumed_samples = epoch, consumed
            self._enter_next_epoch_if_done()

        return move

    def _check_same_data(self, state: Mapping[str, Any]) -> None:
        (num_samples,) = read_counts(state, "num_samples")
        if num_samples != self._order.num_samples:
            raise ValueError(
                f"loader state: num_samples: the position was saved in a dataset of {num_samples} samples, this one "
                f"has {self._order.num_samples}, so the position would mean another sample. Use the same dataset, or "
                "skip the loader's state and begin a new epoch"
            )
        shuffle = state.get("shuffle", True)
        if not isinstance(shuffle, bool):
            raise ValueError(f"loader state: shuffle must be True or False, got {shuffle!r}")
        if shuffle != self._order.shuffle:
            raise ValueError(
                f"loader state: the position was saved with shuffle={not self._order.shuffle}, this loader has "
                f"shuffle={self._order.shuffle}. Build the loader with the saved value"
            )


@final
class UnevenLoader(MapLoader):
    """Loads a rank's shares of uneven steps (uneven.py): batches of different sizes, and whole steps in each epoch.

    The samples at the end of an epoch that do not fill a step are dropped, or with `drop_last` off filled up from the
    start of the epoch's order.
    """

    def __init__(
        self, dataset: Any, order: Order, step: UnevenStep, *, rank: int, drop_last: bool, fetcher: BatchFetcher
    ) -> None:
        if order.num_samples < step.batch:
            raise ValueError(
                f"the dataset has {order.num_samples} samples, fewer than one step of {step.batch} samples, whose "
                f"shares for {step.world_size} ranks differ in size. Use more data, or a smaller batch"
            )
        super().__init__(dataset, order, rank=rank, drop_last=drop_last, fetcher=fetcher)
        self.batch_size = step.most
        self._step = step
        self._index = 0  # micro-steps done in the step at the position

    def __len__(self) -> int:
        return self._num_steps(0) * self._step.accumulation

    def _num_steps(self, consumed: int) -> int:
        """Return the steps left in an epoch after `consumed` samples."""
        left = self._order.num_samples - consumed
        return left // self._step.batch if self._drop_last else -(-left // self._step.batch)

    def _open(self) -> Iterator[Any]:
        return self._fetcher.fetch_batches(self.dataset, self._batches(), self._order.seed)

    def _batches(self) -> Iterator[BatchIndices]:
        step, first = self._step, self.consumed_samples - self._step.micro_step(self._index).start
        order, num_steps, done = self._order.permutation(self.epoch), self._num_steps(first), self._index
        for number in range(done, num_steps * step.accumulation):
            begin = first + number // step.accumulation * step.batch
            share = step.share(number % step.accumulation, self._rank)
            places = np.arange(share.start, max(share.stop, share.start + 1)) + begin
            indices = tuple(order[places % self._order.num_samples].tolist())
            yield BatchIndices(epoch=self.epoch, begin=begin + share.start, indices=indices)

    def _advance(self) -> None:
        self.consumed_samples += len(self._step.micro_step(self._index))
        self._index = (self._index + 1) % self._step.accumulation
        self._enter_next_epoch_if_done()

    def _enter_next_epoch_if_done(self) -> None:
        if not self._index and self._num_steps(self.consumed_samples) <= 0:
            self.epoch, self.consumed_samples = self.epoch + 1, 0

    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Prepare a position, which is between two steps of any world."""
        move = super()._prepare(state)

        def move_to_step() -> None:
            self._index = 0
            move()

        return move_to_step


@final
class SampledLoader(Loader):
    """Loads an indexed dataset in the order of `sampler`, which yields the samples of this rank, as torch's do.

    `set_epoch`, if the sampler has it, receives the epoch number.  The position is a number of samples: after a load
    the loader iterates the sampler and skips that many, which is exact if the order depends on the epoch alone
    (torch's DistributedSampler; not RandomSampler without a generator).  A sampler with `state_dict` and
    `load_state_dict` keeps its own position instead, which is exact without workers, since workers prefetch.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Iterable[int],
        batch_size: int,
        *,
        world_size: int,
        seed: int,
        drop_last: bool,
        fetcher: BatchFetcher,
    ) -> None:
        super().__init__(dataset, batch_size, fetcher)
        self.sampler = sampler
        self._world_size = world_size
        self._seed = seed  # seeds the generators of worker processes
        self._drop_last = drop_last

    def __len__(self) -> int:
        """Return the batches in an epoch.  Raises TypeError unless the sampler has a length."""
        num_samples = len(self.sampler)  # type: ignore[arg-type]
        return num_samples // self.batch_size if self._drop_last else -(-num_samples // self.batch_size)

    def epochs_done(self) -> float:
        try:
            whole = len(self) * self.batch_size * self._world_size
        except TypeError:
            return float(self.epoch)
        return self.epoch + min(1.0, self.consumed_samples / max(whole, 1))

    def state_dict(self) -> dict[str, Any]:
        """Return {epoch, consumed_samples, sampler}; `sampler` is the sampler's state_dict, {} if it has none."""
        saved = self.sampler.state_dict() if self._has_position() else {}  # type: ignore[attr-defined]
        return {"epoch": self.epoch, "consumed_samples": self.consumed_samples, "sampler": saved}

    def _has_position(self) -> bool:
        return hasattr(self.sampler, "state_dict") and hasattr(self.sampler, "load_state_dict")

    def _open(self) -> Iterator[Any]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        return self._fetcher.fetch_batches(self.dataset, self._batch_indices(), self._seed)

    def _batch_indices(self) -> Iterator[BatchIndices]:
        done = self.consumed_samples // self._world_size
        samples = iter(self.sampler) if self._has_position() else islice(self.sampler, done, None)
        while indices := tuple(islice(samples, self.batch_size)):
            if len(indices) < self.batch_size and self._drop_last:
                return
            yield BatchIndices(epoch=self.epoch, begin=done, indices=indices)
            done += len(indices)

    def _advance(self) -> None:
        self.consumed_samples += self.batch_size * self._world_size

    def _finish_epoch(self) -> None:
        self.epoch, self.consumed_samples = self.epoch + 1, 0

    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        epoch, consumed = read_counts(state, "epoch", "consumed_samples")
        saved = state.get("sampler", {})
        restore: Callable[[], None] = do_nothing
        if saved and self._has_position():
            restore = prepare_restore(self.sampler, saved, "sampler")

        def move() -> None:
            restore()
            self.epoch, self.consumed_samples = epoch, consumed

        return move
