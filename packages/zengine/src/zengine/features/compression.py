"""StepCount of compression_training: each technique is on from its schedule_offset, counted in applied steps.

The clock counts applied steps and is part of every checkpoint, so the schedule has no state of its own.  A load sets
it, too, so that the module alone computes as the one that was saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from zengine.compression.layers import StepCount, compressed_layers
from zengine.compression.start import compression_of
from zengine.config.plan.techniques.compression import forward_techniques
from zengine.engine.feature import Feature

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.config.keys.compression import CompressionTraining
    from zengine.engine.clock import Clock
    from zengine.engine.parts import Run
    from zengine.step_report import StepReport

log = logging.getLogger("zengine")


class CompressionSchedule(Feature):
    """Switches the techniques of compressed layers on."""

    name = "compression_training"  # in checkpoints, so that `prepare_load` is called; the state is empty

    count: StepCount  # of the model's layers
    clock: Clock
    is_logging: bool  # on rank 0

    def __init__(self, section: CompressionTraining) -> None:
        self.offsets: Mapping[str, int] = {
            name: technique.shared_parameters.schedule_offset
            for name, technique in forward_techniques(section).items()
        }

    def attach(self, run: Run) -> None:
        """Find the compressed layers; warn if there are none.

        Raises:
            ValueError: layers are split over tensor-parallel ranks, or generation would read their plain weights.
        """
        _check_plan(run.plan)
        self.clock, self.is_logging = run.clock, run.parts.world.rank == 0
        found = compression_of(run.module)
        self.count = StepCount() if found is None else found.count
        if self.is_logging and not compressed_layers(run.module):
            log.warning(
                "compression_training has no effect: no layer of this %s is compressed. Call "
                "zengine.init_compression(model, config) before initialize()",
                type(run.module).__name__,
            )
        self._advance(self.clock.applied_steps)

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._advance(self.clock.applied_steps)  # which the load of an older checkpoint changes
        return args, kwargs

    def step_end(self, report: StepReport) -> None:
        self._advance(report.applied_steps)

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that reads the clock, which is restored by then."""
        return lambda: self._advance(self.clock.applied_steps)

    def _advance(self, steps: int) -> None:
        before, self.count.steps = self.count.steps, steps
        if steps == before or not self.is_logging:
            return
        for name, offset in self.offsets.items():
            if before < offset <= steps:
                log.info("compression_training: %s is on after %d steps", name, steps)


def _check_plan(plan: Plan) -> None:
    degree = plan.parallel.degrees.tensor
    if degree > 1:
        raise ValueError(
            f"compression_training: layers are split over {degree} tensor-parallel ranks, and scales and masks are "
            "of whole weights. Use ZeRO (zero_optimization.stage 3 splits without this), or switch one of the two off"
        )
    if plan.hybrid_engine.enabled:
        raise ValueError(
            "compression_training: hybrid_engine generates with the weights themselves, not as forward rounds and "
            "prunes them. Switch one of the two off"
        )
