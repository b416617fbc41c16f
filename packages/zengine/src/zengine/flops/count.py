"""FLOPs of one real step, counted by operation ("timers.throughput.count_flops_at"; torch.utils.flop_counter).

Counts a step that is trained anyway, so nothing runs twice; the step is slower and its speed is not typical.
Recomputation counts, since the device does it; operations inside a compiled region are not seen.  The chart beside
the formula shows how far the formula is off for this model.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, final

import torch

from zengine.engine.feature import Feature
from zengine.flops.meter import make_counter

if TYPE_CHECKING:
    from zengine.engine.parts import Run


@final
class CountFlops(Feature):
    """Counts from the first forward of a step to its boundary, on rank 0."""

    run: Run

    def __init__(self, step: int) -> None:
        self.step = step  # which one, from 1
        self.counter = make_counter()
        self.counting: list[ExitStack] = []  # none, or one that holds the counter's mode while it counts

    def attach(self, run: Run) -> None:
        self.run = run

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        clock = self.run.clock
        due = clock.steps + 1 == self.step and self.run.parts.world.rank == 0
        if due and not self.counting and torch.is_grad_enabled():
            self.counting.append(ExitStack())
            self.counting[0].enter_context(self.counter)
        return args, kwargs

    def step_begin(self) -> None:
        clock, num_ranks = self.run.clock, self.run.parts.groups.table.numel()
        while self.counting:
            self.counting.pop().close()
            samples = clock.samples_per_micro_step * clock.index  # of all ranks
            self.run.parts.telemetry.counted(self.counter.get_total_flops() * num_ranks / samples)

    def close(self) -> None:
        """Stop counting a step that never completed."""
        while self.counting:
            self.counting.pop().close()
