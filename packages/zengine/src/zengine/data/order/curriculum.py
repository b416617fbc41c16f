"""Curriculum order: the samples that each step may use, as pure arithmetic.

    order = CurriculumOrder(base=Order(...), limits=(Limit(...),), accumulation=2)
    indices, position = order.advance(position, permutations)

A pass follows the plain order: one permutation from (seed, pass), the same at any rank and world size.  The
curriculum skips samples that are too difficult for the current step.  So no sample repeats within a pass, samples
that are admitted later join in their proportion of the data, and a curriculum at the end of its schedule is the
plain order.  A position is two numbers, the pass and a place in it; no list of used samples is kept or saved.
Skipped samples come in a later pass.

A batch that reaches the end of a pass continues in the next one, so all batches are full.

Rejected: clusters of samples in files, one per increase of the difficulty, drawn in proportion to their sizes, as in
DeepSpeed: their bookkeeping has to be saved, and samples repeat while others wait.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, final

import attrs
import numpy as np
from numpy.typing import NDArray

from zengine.data.metrics import MetricError, MetricIndex
from zengine.data.order.order import Indices, Order
from zengine.data.order.schedules import Schedule

_WINDOW = 4096  # places tested at once


class DifficultyType(enum.Enum):
    """Meaning of a difficulty."""

    VALUE = "value"  # samples with a metric of at most the difficulty
    PERCENTILE = "percentile"  # the easiest (difficulty / parts) of all samples
    SINGLE_CLUSTER = "single_cluster"  # all samples are admitted; a post-processing function reads the difficulty


@final
@attrs.frozen(kw_only=True, eq=False)
class Limit:
    """Schedule and metric of one limit."""

    name: str
    schedule: Schedule
    by: DifficultyType
    parts: int  # for percentiles: the difficulty that admits all samples
    index: MetricIndex
    places: NDArray[np.int64]  # (num_samples,): the place of each sample in the order of difficulty

    @classmethod
    def make(cls, schedule: Schedule, by: DifficultyType, index: MetricIndex, parts: int = 100) -> Limit:
        return cls(name=index.name, schedule=schedule, by=by, parts=parts, index=index, places=index.places())

    def count(self, difficulty: int) -> int:
        """Return the number of easiest samples that are admitted."""
        if self.by is DifficultyType.VALUE:
            return self.index.count_by_value(difficulty)
        if self.by is DifficultyType.PERCENTILE:
            return self.index.count_by_percentile(difficulty, self.parts)
        return len(self.places)


@attrs.frozen(kw_only=True)
class Position:
    """Position in a curriculum order."""

    epoch: int = 0  # completed passes
    place: int = 0  # in the permutation of this pass
    step: int = 0  # completed optimizer steps
    micro_step: int = 0  # completed micro-steps of the current step


@final
@attrs.frozen(kw_only=True, eq=False)
class CurriculumOrder:
    """Order of samples under limits, for all ranks together."""

    base: Order  # without limits
    limits: tuple[Limit, ...]
    accumulation: int  # micro-steps of a step; they share a difficulty

    def difficulties(self, step: int) -> dict[str, int]:
        """Return the difficulty of each metric at `step`, counted from 0; schedules count from 1, as in DeepSpeed."""
        return {limit.name: limit.schedule.at(step + 1) for limit in self.limits}

    def advance(self, start: Position, permutations: Mapping[int, Indices]) -> tuple[Indices, Position]:
        """Return ((stride,) samples of the next micro-step of all ranks, the position after it).

        permutations: the order of each pass; see `Permutations`.

        Raises:
            MetricError: the limits admit no sample.
        """
        counts = self._counts(start.step)
        parts: list[Indices] = []
        missing, epoch, place = self.base.stride, start.epoch, start.place
        num_before_pass = -1 if place else missing  # `missing` when this pass began; -1: it began earlier
        while missing:
            found, place = self._find_admitted(permutations[epoch], place, missing, counts)
            parts.append(found)
            missing -= len(found)
            if place < self.base.num_samples:
                continue
            if missing == num_before_pass:
                raise self._no_sample_error(start.step)
            epoch, place, num_before_pass = epoch + 1, 0, missing
        micro_step = (start.micro_step + 1) % self.accumulation
        step = start.step + (micro_step == 0)
        return np.concatenate(parts), Position(epoch=epoch, place=place, step=step, micro_step=micro_step)

    def _counts(self, step: int) -> list[tuple[Limit, int]]:
        """Return the limits that exclude samples, with their counts."""
        difficulties = self.difficulties(step)
        counts = [(limit, limit.count(difficulties[limit.name])) for limit in self.limits]
        return [(limit, count) for limit, count in counts if count < self.base.num_samples]

    def _find_admitted(
        self, permutation: Indices, place: int, wanted: int, counts: list[tuple[Limit, int]]
    ) -> tuple[Indices, int]:
        """Return up to `wanted` admitted samples from `place` on, and the place after the last one visited."""
        while place < len(permutation):
            window = permutation[place : place + max(_WINDOW, wanted)]
            easy = np.ones(len(window), dtype=bool)
            for limit, count in counts:
                easy &= limit.places[window] < count
            where = np.flatnonzero(easy)[:wanted]
            if len(where):
                is_all = len(where) == wanted
                return window[where], place + (int(where[-1]) + 1 if is_all else len(window))
            place += len(window)
        return permutation[:0], place

    def _no_sample_error(self, step: int) -> MetricError:
        limits = ", ".join(
            f"{limit.name} {'<=' if limit.by is DifficultyType.VALUE else 'percentile'} "
            f"{limit.schedule.at(step + 1)} (admits {limit.count(limit.schedule.at(step + 1))} of "
            f"{len(limit.places)}; the smallest is {limit.index.metrics[0]})"
            for limit in self.limits
            if limit.by is not DifficultyType.SINGLE_CLUSTER
        )
        return MetricError(
            f"the limits of curriculum step {step + 1} admit no sample: {limits}. Raise min_difficulty until the "
            "limits together admit samples"
        )


class Permutations(Mapping[int, Indices]):
    """Permutation of each pass; caches the last one."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epoch, self._cached = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, epoch: int) -> Indices:
        if epoch != self._epoch:
            self._epoch, self._cached = epoch, self._order.permutation(epoch)
        return self._cached

    def __iter__(self) -> Iterator[int]:
        yield from (self._epoch,)

    def __len__(self) -> int:
        return 1


def with_schedules(limits: tuple[Limit, ...], schedules: Mapping[str, Any]) -> tuple[Limit, ...]:
    """Return the limits with `schedules` by name."""
    return tuple(attrs.evolve(limit, schedule=schedules[limit.name]) for limit in limits)
