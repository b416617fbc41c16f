"""Loader of a curriculum: its order skips samples that are too difficult for the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import attrs

from zengine.data.loaders.base import Loader, check_below, read_counts
from zengine.data.loaders.fetch import BatchFetcher
from zengine.data.metrics import digest
from zengine.data.order.curriculum import CurriculumOrder, Permutations, Position, with_schedules
from zengine.data.order.order import BatchIndices
from zengine.data.order.schedules import with_custom_functions


@final
class CurriculumLoader(Loader):
    """Loads an indexed dataset under limits that rise with the steps.

    As with DeepSpeed's sampler, one iteration has `num_epochs` times the samples of the dataset, however many passes
    the order makes over it; the next iteration continues from there.  `epoch` counts passes, `consumed_samples` the
    samples of the iteration.
    """

    def __init__(
        self, dataset: Any, order: CurriculumOrder, *, rank: int, num_epochs: int, fetcher: BatchFetcher
    ) -> None:
        super().__init__(dataset, order.base.micro_batch_size, fetcher)
        self._order = order
        self._rank = rank
        self._num_batches = num_epochs * order.base.num_samples // order.base.stride
        self._position = Position()
        self._fetched: deque[Position] = deque()  # position after each batch that was fetched, not yet received
        self._last_step = 0  # step of the last batch that the loop received

    def fingerprint(self) -> list[str]:
        metrics = [f"metric {limit.name} {digest(limit.places)}" for limit in self._order.limits]
        return [f"{self._order.base.num_samples} samples", *metrics]

    def __len__(self) -> int:
        """Return the batches of one iteration."""
        return self._num_batches

    def epochs_done(self) -> float:
        """Return the passes over the data; a pass is shorter while fewer samples are admitted."""
        return self._position.epoch + self._position.place / self._order.base.num_samples

    def set_custom_schedule(self, functions: Mapping[str, Callable[[int], int]] | Callable[[int], int]) -> None:
        """Set the functions of custom schedules, for batches not yet fetched."""
        schedules = with_custom_functions({limit.name: limit.schedule for limit in self._order.limits}, functions)
        self._order = attrs.evolve(self._order, limits=with_schedules(self._order.limits, schedules))

    def set_accumulation(self, accumulation: int) -> None:
        """Set the micro-steps per step, for batches not yet fetched; call it between steps."""
        self._order = attrs.evolve(self._order, accumulation=accumulation)

    @property
    def difficulties(self) -> dict[str, int]:
        """Difficulty of each metric for the last batch that the loop received."""
        return self._order.difficulties(self._last_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on every rank; `current_difficulties` belong to the last batch."""
        order = self._order.base
        return {
            "seed": order.seed,
            **attrs.asdict(self._position),
            "consumed_samples": self.consumed_samples,
            "num_samples": order.num_samples,
            "curriculum_step": self._last_step + 1,
            "current_difficulties": self.difficulties,
        }

    def _open(self) -> Iterator[Any]:
        self._fetched.clear()
        left = self._num_batches - self.consumed_samples // self._order.base.stride
        return self._fetcher.fetch_batches(self.dataset, self._batch_indices(left), self._order.base.seed)

    def _batch_indices(self, count: int) -> Iterator[BatchIndices]:
        position, permutations = self._position, Permutations(self._order.base)
        micro = self._order.base.micro_batch_size
        for _ in range(count):
            start = position
            indices, position = self._order.advance(start, permutations)
            self._fetched.append(position)
            mine = indices[self._rank * micro : (self._rank + 1) * micro]
            begin = start.place * self._order.base.world_size + self._rank  # unique within a pass
            yield BatchIndices(epoch=start.epoch, begin=begin, indices=tuple(mine.tolist()))

    def _advance(self) -> None:
        self._last_step = self._position.step
        self._position = self._fetched.popleft()
        self.epoch = self._position.epoch
        self.consumed_samples += self._order.base.stride
        if self.consumed_samples // self._order.base.stride >= self._num_batches:
            self.consumed_samples = 0

    def _finish_epoch(self) -> None: ...

    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Prepare the saved position and seed; with another batch size the order continues at the same sample."""
        names = ("seed", "epoch", "place", "step", "micro_step", "consumed_samples", "num_samples")
        seed, epoch, place, step, micro_step, consumed, num_samples = read_counts(state, *names)
        if num_samples != self._order.base.num_samples:
            raise ValueError(
                f"loader state: num_samples: the position was saved in a dataset of {num_samples} samples, this one "
                f"has {self._order.base.num_samples}, so the position would mean another sample. Use the same "
                "dataset"
            )
        check_below("place", place, num_samples, "samples of a pass")
        order = attrs.evolve(self._order, base=attrs.evolve(self._order.base, seed=seed))
        at = Position(epoch=epoch, place=place, step=step, micro_step=micro_step % order.accumulation)

        def move() -> None:
            self._order, self._position = order, at
            self._last_step = max(step - (micro_step == 0), 0)
            self.epoch, self.consumed_samples = epoch, consumed

        return move
