"""Learning-rate scaling with the batch size, for batches by tokens.

A step over more samples has a less noisy gradient and allows a larger rate: in proportion (Goyal et al. 2017) or by
the square root (You et al. 2019, for adaptive optimizers).  The reference is the config's train_batch_size.

Rates are scaled only during the optimizer's update and restored before the schedule steps, so any schedule, even one
that multiplies present rates, reads its own rates, and checkpoints hold unscaled ones.  The size of a step is the
number of samples that the loader delivered to all ranks since the last boundary; every rank knows it without
communication.

The engine's mean over micro-steps and ranks weights each micro-batch equally, though they hold unequal numbers of
samples; pass a weight with the loss to `backward` for the exact mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import Tensor

from zengine.engine.feature import Feature

if TYPE_CHECKING:
    from zengine.data import PackedLoader
    from zengine.engine.clock import Clock, MicroStep
    from zengine.engine.parts import OptimizerSlot, OwnStep, Run, TelemetrySlot
    from zengine.step_report import StepReport
    from zpartition import Partition


def lr_factor(method: str, batch_size: int, reference: int) -> float:
    """Return the factor on the learning rate: "linear", "sqrt" or "none"."""
    ratio = batch_size / reference
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[method]


@final
@attrs.define(eq=False)
class ScaledRate:
    """Optimizer wrapper that multiplies the rates by `factor` during an update."""

    slot: OptimizerSlot
    factor: float = 1.0  # of the running step

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.slot.optimizer

    @property
    def scaled(self) -> OwnStep | None:
        return self.slot.scaled

    def update(self, partition: Partition, divisor: Tensor | None, *, any_unused: bool) -> None:
        """Run one step at the scaled rates."""
        with self._scaled_rates():
            self.slot.update(partition, divisor, any_unused=any_unused)

    def lr(self) -> tuple[float, ...]:
        """Return the rates of the running step; between steps those of the schedule."""
        return tuple(rate * self.factor for rate in self.slot.lr())

    @contextmanager
    def _scaled_rates(self) -> Iterator[None]:
        groups = [] if self.optimizer is None else [g for g in self.optimizer.param_groups if "lr" in g]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates):
            group["lr"] = rate * self.factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates):
                group["lr"] = rate


@final
class DynamicBatching(Feature):
    """Sets the factor of each step, and counts its samples."""

    name = "dynamic_batching"  # in checkpoints, so that `prepare_load` is called; the state is empty

    loader: PackedLoader
    clock: Clock
    rate: ScaledRate
    reference: int  # samples of a step at which the factor is 1
    mark: int  # samples delivered when the step began
    batch_size: int  # samples of the last step, of all ranks
    telemetry: TelemetrySlot
    has_begun: bool  # the step has had a backward

    def __init__(self, method: str) -> None:
        self.method = method

    def attach(self, run: Run) -> None:
        self.loader, self.clock, self.telemetry = run.parts.loader, run.clock, run.parts.telemetry
        self.reference = run.plan.batch.train_batch_size
        assert isinstance(run.parts.optimizer, ScaledRate), "the assembler wraps the slot for this feature"
        self.rate = run.parts.optimizer
        self._begin()

    def backward_begin(self, micro: MicroStep, loss: Tensor) -> Tensor:
        """Exclude the samples of a failed attempt when its step begins again."""
        if micro.is_first and self.has_begun:
            self.mark = self.loader.samples_handed - self.loader.last_samples
        self.has_begun = True
        return loss

    def step_begin(self) -> None:
        """Set factor and samples of the step from the samples delivered since the last one.

        A failed update is repeated, so the samples are not counted here but passed to the clock.  Batches from
        elsewhere (no samples delivered) keep the factor 1.
        """
        batch_size = self.batch_size = self.loader.samples_handed - self.mark
        self.rate.factor = lr_factor(self.method, batch_size, self.reference) if batch_size else 1.0
        if batch_size:
            self.clock.step_samples = batch_size

    def step_end(self, report: StepReport) -> None:
        self._begin()
        self.telemetry.write_events([("data/batch_size", self.batch_size, report.step)])

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that restarts the count: samples delivered before the load belong to another run."""
        return self._begin

    def _begin(self) -> None:
        self.mark, self.has_begun, self.rate.factor = self.loader.samples_handed, False, 1.0
