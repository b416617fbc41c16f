"""The engine's slots, as protocols, with the identity implementations that live here.

| slot | identity | others |
|---|---|---|
| partition | stage 0 (`ZeroPolicy()`) | ZeRO 1, 2 |
| scaler | `zprecision.NoScaling` | static, dynamic |
| optimizer | `NoOptimizer` | `ShardOptimizer` over any torch or zoptim optimizer |
| runner | `zengine.runners.Sequential` | casting, autocast, with hooks around float32 modules |
| telemetry | `zengine.telemetry.Silent` | spans, throughput, sinks |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor

import zcomm
import zpartition
import zprecision
from zengine.clock import Clock
from zengine.drift import Drift
from zengine.optimizer_calls import OwnStep
from zengine.report import StepReport
from zengine.runners import Runner
from zengine.saving import Saver
from zengine.telemetry.subject import Subject
from zengine.verdict import Fault, Judge
from zengine.weighing import StepLoss


class Schedule(Protocol):
    """A learning-rate schedule, as torch's and zoptim's are."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@final
class ConstantRate:
    """The identity schedule: the learning rate stays what the optimizer says."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class OptimizerSlot(Protocol):
    """Updates the shards of a partition."""

    def update(self, partition: zpartition.Partition, divisor: Tensor | None, *, any_unused: bool) -> None: ...
    def lr(self) -> tuple[float, ...]: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...


@final
@attrs.define(eq=False)
class ShardOptimizer:
    """Any torch optimizer, rebound onto the shards."""

    optimizer: torch.optim.Optimizer
    scaled: OwnStep  # its step, which divides gradients by `grad_scale`

    def update(self, partition: zpartition.Partition, divisor: Tensor | None, *, any_unused: bool) -> None:
        """One step with gradients divided by `divisor` (None: by one)."""
        self.scaled.grad_scale = divisor
        try:
            partition.apply(self.scaled.step, any_unused=any_unused)
        finally:
            self.scaled.grad_scale = None

    def lr(self) -> tuple[float, ...]:
        """Learning rate of each parameter group."""
        return tuple(float(group["lr"]) for group in self.optimizer.param_groups)


@final
@attrs.define(eq=False)
class NoOptimizer:
    """For engines that only run forward; an update is refused."""

    optimizer: None = None

    def update(self, partition: zpartition.Partition, divisor: Tensor | None, *, any_unused: bool) -> None:
        raise ValueError(
            "step() needs an optimizer, and this engine has none: pass optimizer= to initialize(), or add an "
            '"optimizer" section to the config'
        )

    def lr(self) -> tuple[float, ...]:
        """No groups."""
        return ()


class TelemetrySlot(Protocol):
    """Measures and reports; see `zengine.telemetry`."""

    def begin(self, subject: Subject) -> None: ...
    def span(self, name: str) -> AbstractContextManager[None]: ...
    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None: ...
    def report_tokens(self, num_tokens: int) -> None: ...
    def recomputes(self, share: float) -> None: ...
    def counted(self, flops_per_sample: float) -> None: ...
    def layers(self, norms: Mapping[str, float]) -> None: ...
    def write_events(self, events: Sequence[tuple[str, float, int]], flush: bool = True) -> None: ...
    def micro_step_end(self) -> None: ...
    def step_end(self, report: StepReport) -> None: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...
    @property
    def enabled(self) -> bool: ...
    @property
    def bench_done(self) -> bool: ...


@attrs.frozen(kw_only=True)
class Numbers:
    """One inspection of the gradients, on the host; equal on all ranks."""

    is_finite: bool
    norm: float  # still scaled
    scale: float  # the loss scale that the gradients carry
    drift: float  # 0 where ranks agree on what must be alike
    num_unused: int  # parameters without gradient, summed over ranks
    loss: float  # mean over micro-steps and ranks
    remainder: float  # what weights of losses leave to divide by; 1 without weights, 0 if nothing weighed anything


class Inspect(Protocol):
    """Looks at the gradients once; see `zprecision.inspect`."""

    def __call__(self, grads: Sequence[Tensor], *, extra: Tensor) -> zprecision.GradientStats: ...


@attrs.frozen(kw_only=True, eq=False)
class Parts:
    """What an engine is made of; `assemble` chooses."""

    world: zcomm.World
    groups: zcomm.Groups  # who the ranks are to each other
    partition: zpartition.Partition
    scaler: zprecision.Scaler
    optimizer: OptimizerSlot
    scheduler: Schedule
    runner: Runner
    telemetry: TelemetrySlot
    inspect: Inspect
    divisor: Callable[[Numbers], Tensor | None]  # what gradients are divided by
    drift: Drift  # what ranks are compared in
    judge: Judge
    exchange: Callable[[Any], list[Any]]  # a value of each rank, to all
    saver: Saver
    checkpointing: Callable[[], zpartition.activations.Checkpointing]  # the same one each time
    loader: Any  # the zengine loader, or None when the caller brings the data
    client_scheduler: Any  # what the caller sees as lr_scheduler; None without one

    def read(self, stats: zprecision.GradientStats, losses: StepLoss) -> Numbers:
        """What one boundary needs on the host, before anything moves."""
        norm, drift, unused, loss, weight, num_weighted = stats.numbers
        remainder = losses.remainder(weight, num_weighted)
        return Numbers(
            is_finite=stats.finite,
            norm=norm,
            scale=float(self.scaler.factor),
            drift=drift,
            num_unused=int(unused),
            loss=loss / remainder if remainder else 0.0,
            remainder=remainder,
        )

    def verdict(self, numbers: Numbers, losses: StepLoss) -> Fault:
        """Whether the update is left out, and why."""
        if numbers.remainder == 0:
            return Fault("the weights of all losses of the step are 0, so there is nothing to take a mean of")
        return self.judge(numbers.is_finite, self.partition, losses.is_finite)

    def report(self, clock: Clock, numbers: Numbers, lr: tuple[float, ...], fault: Fault) -> StepReport:
        """The report of the boundary that the clock has just counted."""
        reason = ""
        if fault:
            reason = f"{fault.reason} (step {clock.steps}, loss scale {numbers.scale:g}): step skipped"
            scale_now = float(self.scaler.factor)
            reason += f", scale now {scale_now:g}" if scale_now != numbers.scale else ""
        return StepReport(
            applied=not fault,
            reason=reason,
            step=clock.steps,
            applied_steps=clock.applied_steps,
            skipped_steps=clock.skipped_steps,
            samples=clock.samples,
            loss=numbers.loss,
            grad_norm=numbers.norm / (numbers.scale * (numbers.remainder or 1.0)),
            loss_scale=numbers.scale,
            lr=lr,
            culprit=fault.culprit,
        )

    def close(self) -> None:
        """Give back hooks, buffers and files. The world stays: others may use it."""
        with contextlib.ExitStack() as stack:  # a save that failed is told when all is given back
            stack.callback(self.saver.close)
            stack.callback(self.telemetry.close)
            stack.callback(self.runner.close)
            self.partition.close()
