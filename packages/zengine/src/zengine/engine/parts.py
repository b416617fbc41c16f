"""An engine's slots as protocols, the identities that live here, and the `Run` that features and checkpoints get.

| slot | identity | others |
|---|---|---|
| partition | stage 0 (`ZeroPolicy()`) | ZeRO 1, 2, 3 |
| scaler | `zprecision.NoScaling` | static, dynamic |
| optimizer | `NoOptimizer` | `ShardOptimizer` over any torch or zoptim optimizer |
| runner | `zengine.engine.runners.Sequential` | casting, autocast, with hooks around float32 modules |
| telemetry | `zengine.telemetry.Silent` | spans, throughput, sinks |
| checkpoints | saves before it returns | saves in the background |
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, final

import attrs
import torch
from torch import Tensor, nn

import zcomm
import zpartition
import zprecision
from zengine.config import Plan
from zengine.engine.clock import Clock, MicroStep, Sync
from zengine.engine.drift import Drift
from zengine.engine.loss_weighting import StepLoss
from zengine.engine.nonfinite import OverflowPolicy, SkipReason
from zengine.engine.runners import Runner
from zengine.step_report import StepReport
from zengine.telemetry.subject import Subject

if TYPE_CHECKING:
    from zpartition.activations import Checkpointing


class LRScheduleSlot(Protocol):
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
    @property
    def scaled(self) -> OwnStep | None: ...  # the step of `optimizer`


class ScaledStep(Protocol):
    """An optimizer step that divides gradients by `grad_scale` while it updates."""

    grad_scale: Tensor | None

    def step(self) -> object: ...


@final
class OwnStep:
    """An optimizer step as the engine calls it: `grad_scale` and `step` of `scaled`.

    Invariant: `is_running` in a thread exactly while that thread is inside `step`.
    """

    def __init__(self, scaled: ScaledStep) -> None:
        self.scaled = scaled
        self._thread = threading.local()

    @property
    def grad_scale(self) -> Tensor | None:
        return self.scaled.grad_scale

    @grad_scale.setter
    def grad_scale(self, value: Tensor | None) -> None:
        self.scaled.grad_scale = value

    @property
    def is_running(self) -> bool:
        """True in the thread that is inside `step`."""
        return getattr(self._thread, "is_inside", False)

    def step(self) -> object:
        """Call the optimizer's real step."""
        self._thread.is_inside = True
        try:
            return self.scaled.step()
        finally:
            self._thread.is_inside = False


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
    scaled: None = None

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


class SavedFeature(Protocol):
    """A feature as checkpoints see it."""

    @property
    def name(self) -> str: ...  # "": it has no state
    def state_dict(self) -> Mapping[str, Any]: ...
    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]: ...


class CheckpointSlot(Protocol):
    """Saves and restores a run; see `zengine.checkpoint.save_load`.  All ranks call each of its methods."""

    def save(
        self,
        run: Run,
        features: Sequence[SavedFeature],
        root: str,
        tag: str | None,
        client_state: Mapping[str, Any],
        *,
        latest: bool,
        trained_only: bool,
    ) -> str: ...
    def load(
        self,
        run: Run,
        features: Sequence[SavedFeature],
        root: str,
        tag: str | None,
        *,
        strict: bool,
        module_only: bool,
        optimizer: bool,
        scheduler: bool,
    ) -> tuple[str, dict[str, Any]]: ...
    def restore_from_memory(self, run: Run, features: Sequence[SavedFeature]) -> dict[str, Any]: ...
    def load_weights(
        self, run: Run, path: str | os.PathLike[str], *, strict: bool, like: nn.Module | None
    ) -> None: ...
    def state_dict(self, run: Run, *args: Any, **kwargs: Any) -> dict[str, Any]: ...
    def load_state_dict(self, run: Run, state_dict: Mapping[str, Any], *, strict: bool) -> Any: ...
    def check(self) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


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
    scheduler: LRScheduleSlot
    runner: Runner
    telemetry: TelemetrySlot
    inspect: Inspect
    divisor: Callable[[Numbers], Tensor | None]  # what gradients are divided by
    drift: Drift  # what ranks are compared in
    overflow_policy: OverflowPolicy
    exchange: Callable[[Any], list[Any]]  # a value of each rank, to all
    checkpoints: CheckpointSlot
    checkpointing: Callable[[], Checkpointing]  # the same one each time
    loader: Any  # the zengine loader, or None when the caller brings the data
    client_scheduler: Any  # what the caller sees as lr_scheduler; None without one

    def read(self, stats: zprecision.GradientStats, losses: StepLoss) -> Numbers:
        """Return what one boundary needs on the host, before anything moves."""
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

    def skip_reason(self, numbers: Numbers, losses: StepLoss) -> SkipReason:
        """Return why the update is skipped; falsy if it is applied."""
        if numbers.remainder == 0:
            return SkipReason("the weights of all losses of the step are 0, so there is nothing to take a mean of")
        return self.overflow_policy(numbers.is_finite, self.partition, losses.is_finite)

    def report(self, clock: Clock, numbers: Numbers, lr: tuple[float, ...], skip: SkipReason) -> StepReport:
        """The report of the boundary that the clock has just counted."""
        reason = ""
        if skip:
            reason = f"{skip.reason} (step {clock.steps}, loss scale {numbers.scale:g}): step skipped"
            scale_now = float(self.scaler.factor)
            reason += f", scale now {scale_now:g}" if scale_now != numbers.scale else ""
        return StepReport(
            applied=not skip,
            reason=reason,
            step=clock.steps,
            applied_steps=clock.applied_steps,
            skipped_steps=clock.skipped_steps,
            samples=clock.samples,
            loss=numbers.loss,
            grad_norm=numbers.norm / (numbers.scale * (numbers.remainder or 1.0)),
            loss_scale=numbers.scale,
            lr=lr,
            nonfinite=skip.nonfinite,
        )

    def close(self) -> None:
        """Give back hooks, buffers and files. The world stays: others may use it."""
        with contextlib.ExitStack() as stack:  # an error of a background save is raised after everything is closed
            stack.callback(self.checkpoints.close)
            stack.callback(self.telemetry.close)
            stack.callback(self.runner.close)
            self.partition.close()


@attrs.frozen(eq=False)
class Run:
    """An engine's state, as features, checkpoints and exports see it: they get this and never the engine.

    The engine makes another one when `plan` changes (`set_train_batch_size`); the other members stay the same.
    """

    module: nn.Module
    parts: Parts
    plan: Plan
    clock: Clock
    losses: StepLoss

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, its groups rebound onto this rank's shards."""
        return self.parts.optimizer.optimizer

    @property
    def micro_batch_size(self) -> int:
        """Samples of one forward on one rank, as they are now."""
        return self.clock.samples_per_micro_step // self.plan.batch.replicas

    @property
    def device(self) -> torch.device:
        """Device of the module."""
        return self.parts.world.device

    def reducing(self, micro: MicroStep, *, is_weighted: bool = False) -> AbstractContextManager[None]:
        """Return the partition's context for the backward of `micro`: inside, gradients are reduced or kept local."""
        return self.parts.partition.micro_step(
            is_last=micro.is_last,
            is_local=micro.sync is Sync.LOCAL,
            is_scaled=is_weighted or self.plan.scales_losses,
        )
