"""Loader of a curriculum: its samples come from a walk that skips samples that are too difficult."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import attrs

from zengine.data.files.arrays import digest
from zengine.data.loaders.base import Loader, check_below, whole_numbers
from zengine.data.loaders.fetch import Fetching
from zengine.data.order.curriculum import CurriculumWalk, Permutations, Position, replaced
from zengine.data.order.order import Ticket
from zengine.data.order.schedules import with_laws


@final
class CurriculumLoader(Loader):
    """Loads an indexed dataset under limits that rise with the steps.

    As with DeepSpeed's sampler one iteration lasts `num_epochs` times the data, regardless of passes of the walk; the
    next iteration continues from there.  `epoch` counts passes and `consumed_samples` the samples of the iteration.
    """

    def __init__(self, dataset: Any, walk: CurriculumWalk, *, rank: int, num_epochs: int, fetching: Fetching) -> None:
        super().__init__(dataset, walk.order.micro_batch_size, fetching)
        self._walk = walk
        self._rank = rank
        self._num_batches = num_epochs * walk.order.num_samples // walk.order.stride
        self._at = Position()
        self._ahead: deque[Position] = deque()  # behind each batch that was fetched and not handed
        self._handed_step = 0  # the step of the last batch that was handed

    def fingerprint(self) -> list[str]:
        metrics = [f"metric {limit.name} {digest(limit.places)}" for limit in self._walk.limits]
        return [f"{self._walk.order.num_samples} samples", *metrics]

    def __len__(self) -> int:
        """Return the batches of one iteration."""
        return self._num_batches

    def epochs_done(self) -> float:
        """Return the passes of the walk, which is faster while less is admitted."""
        return self._at.epoch + self._at.place / self._walk.order.num_samples

    def set_custom_schedule(self, laws: Mapping[str, Callable[[int], int]] | Callable[[int], int]) -> None:
        """Set functions for the metrics with a custom schedule, for batches not yet fetched."""
        schedules = with_laws({limit.name: limit.schedule for limit in self._walk.limits}, laws)
        self._walk = attrs.evolve(self._walk, limits=replaced(self._walk.limits, schedules))

    def set_accumulation(self, accumulation: int) -> None:
        """Set the micro-steps per step, for batches not yet fetched; call it between steps."""
        self._walk = attrs.evolve(self._walk, accumulation=accumulation)

    @property
    def difficulties(self) -> dict[str, int]:
        """Difficulty of each metric for the last batch handed to the caller."""
        return self._walk.difficulties(self._handed_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on every rank; `current_difficulties` are those of the last batch."""
        order = self._walk.order
        return {
            "seed": order.seed,
            **attrs.asdict(self._at),
            "consumed_samples": self.consumed_samples,
            "num_samples": order.num_samples,
            "curriculum_step": self._handed_step + 1,
            "current_difficulties": self.difficulties,
        }

    def _open(self) -> Iterator[Any]:
        self._ahead.clear()
        left = self._num_batches - self.consumed_samples // self._walk.order.stride
        return self._fetching.of_tickets(self.dataset, self._tickets(left), self._walk.order.seed)

    def _tickets(self, count: int) -> Iterator[Ticket]:
        position, permutations = self._at, Permutations(self._walk.order)
        micro = self._walk.order.micro_batch_size
        for _ in range(count):
            start = position
            indices, position = self._walk.take(start, permutations)
            self._ahead.append(position)
            mine = indices[self._rank * micro : (self._rank + 1) * micro]
            begin = start.place * self._walk.order.world_size + self._rank  # unique in a pass
            yield Ticket(epoch=start.epoch, begin=begin, indices=tuple(mine.tolist()))

    def _handed(self) -> None:
        self._handed_step = self._at.step
        self._at = self._ahead.popleft()
        self.epoch = self._at.epoch
        self.consumed_samples += self._walk.order.stride
        if self.consumed_samples // self._walk.order.stride >= self._num_batches:
            self.consumed_samples = 0

    def _ended(self) -> None: ...

    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Keep the saved seed; with another batch size the walk continues at the same sample."""
        names = ("seed", "epoch", "place", "step", "micro_step", "consumed_samples", "num_samples")
        seed, epoch, place, step, micro_step, consumed, num_samples = whole_numbers(state, *names)
        if num_samples != self._walk.order.num_samples:
            raise ValueError(
                f"loader state: num_samples: the position was saved in a dataset of {num_samples} samples, this one "
                f"has {self._walk.order.num_samples}, so the same place would be another sample. Use the same dataset"
            )
        check_below("place", place, num_samples, "samples of a pass")
        walk = attrs.evolve(self._walk, order=attrs.evolve(self._walk.order, seed=seed))
        at = Position(epoch=epoch, place=place, step=step, micro_step=micro_step % walk.accumulation)

        def move() -> None:
            self._walk, self._at = walk, at
            self._handed_step = max(step - (micro_step == 0), 0)
            self.epoch, self.consumed_samples = epoch, consumed

        return move
