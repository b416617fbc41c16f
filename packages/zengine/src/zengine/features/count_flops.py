"""The FLOPs of one real step, operation by operation ("timers.throughput.count_flops_at"; torch.utils.flop_counter).

A step that is trained anyway is counted, so nothing runs twice; it is slower, and its speed is not typical.  What is
recomputed counts, for the device does it; what a compiled region does is not seen.  Beside the formula it tells how
far the formula is from this model.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

import torch

from zengine.features.base import Feature
from zengine.telemetry.flops_meter import make_counter

if TYPE_CHECKING:
    from zengine.engine import Engine


@final
class CountFlops(Feature):
    """Counts from the first forward of a step to its boundary, on rank 0."""

    engine: Engine

    def __init__(self, step: int) -> None:
        self.step = step  # which one, from 1
        self.counter = make_counter()
        self.counting: list[ExitStack] = []  # none, or one that holds the counter's mode while it counts

    def attach(self, engine: Engine) -> None:
        self.engine = engine

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        clock = self.engine.clock
        due = clock.steps + 1 == self.step and self.engine.parts.world.rank == 0
        if due and not self.counting and torch.is_grad_enabled():
            self.counting.append(ExitStack())
            self.counting[0].enter_context(self.counter)
        return args, kwargs

    def step_begin(self) -> None:
        clock, num_ranks = self.engine.clock, self.engine.parts.groups.table.numel()
        while self.counting:
            self.counting.pop().close()
            samples = clock.samples_per_micro_step * clock.index  # of all ranks
            self.engine.parts.telemetry.counted(self.counter.get_total_flops() * num_ranks / samples)

    def close(self) -> None:
        """Of a step that never came to its end: nothing is counted from now on."""
        while self.counting:
            self.counting.pop().close()
