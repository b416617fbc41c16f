"""Loader of a sampler of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, final

from zengine.data.loaders.base import Loader, named_rehearsal, nothing_to_do, whole_numbers
from zengine.data.loaders.fetch import Fetching
from zengine.data.order.order import Ticket


@final
class SampledLoader(Loader):
    """Loads an indexed dataset in the order of `sampler`, which yields the samples of this rank as torch's do.

    A sampler with `set_epoch` receives the epoch number.  The position is a number of samples: after a load the
    sampler is iterated and that many are skipped, which is exact if its order depends on the epoch alone (torch's
    DistributedSampler; not RandomSampler without a generator).  A sampler with `state_dict` and `load_state_dict`
    keeps its own position instead, which is right if samples are not requested ahead (no workers).
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
        fetching: Fetching,
    ) -> None:
        super().__init__(dataset, batch_size, fetching)
        self.sampler = sampler
        self._world_size = world_size
        self._seed = seed  # of the generators in worker processes
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
        """Return {epoch, consumed_samples, sampler}; `sampler` is its own state_dict, {} without one."""
        saved = self.sampler.state_dict() if self._has_position() else {}  # type: ignore[attr-defined]
        return {"epoch": self.epoch, "consumed_samples": self.consumed_samples, "sampler": saved}

    def _has_position(self) -> bool:
        return hasattr(self.sampler, "state_dict") and hasattr(self.sampler, "load_state_dict")

    def _open(self) -> Iterator[Any]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        return self._fetching.of_tickets(self.dataset, self._tickets(), self._seed)

    def _tickets(self) -> Iterator[Ticket]:
        done = self.consumed_samples // self._world_size
        samples = iter(self.sampler) if self._has_position() else islice(self.sampler, done, None)
        while indices := tuple(islice(samples, self.batch_size)):
            if len(indices) < self.batch_size and self._drop_last:
                return
            yield Ticket(epoch=self.epoch, begin=done, indices=indices)
            done += len(indices)

    def _handed(self) -> None:
        self.consumed_samples += self.batch_size * self._world_size

    def _ended(self) -> None:
        self.epoch, self.consumed_samples = self.epoch + 1, 0

    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        epoch, consumed = whole_numbers(state, "epoch", "consumed_samples")
        saved = state.get("sampler", {})
        place: Callable[[], None] = nothing_to_do
        if saved and self._has_position():
            place = named_rehearsal(self.sampler, saved, "sampler")

        def move() -> None:
            place()
            self.epoch, self.consumed_samples = epoch, consumed

        return move
