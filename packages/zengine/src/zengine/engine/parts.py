"""Slots of an engine as protocols, some of their defaults, and the `Run` that features and checkpoints get.

| slot | default | others |
|---|---|---|
| partition | stage 0 (`ZeroPolicy()`) | ZeRO 1, 2, 3 |
| scaler | `zprecision.NoScaling` | static, dynamic |
| optimizer | `NoOptimizer` | `ShardOptimizer` over any torch or zoptim optimizer |
| runner | `zengine.engine.runners.Sequential` | casting, autocast, with hooks around float32 modules |
| telemetry | `zengine.telemetry.Silent` | spans, throughput, sinks |
| checkpoints | save before it returns | save in the background |
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Learning-rate schedule with the interface of torch's and zoptim's."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@final
class ConstantRate:
    """Identity schedule: the learning rate stays the optimizer's."""

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
    """Optimizer step that divides gradients by `grad_scale` while it updates."""

    grad_scale: Tensor | None

    def step(self) -> object: ...


@final
class OwnStep:
    """Optimizer step as the engine calls it: `grad_scale` and `step` of `scaled`.

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
        """Return True in the thread that is inside `step`."""
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
    """Any torch optimizer, rebound to the shards."""

    optimizer: torch.optim.Optimizer
    scaled: OwnStep  # its step, which divides gradients by `grad_scale`

    def update(self, partition: zpartition.Partition, divisor: Tensor | None, *, any_unused: bool) -> None:
        """Run one step with gradients divided by `divisor` (None: 1)."""
        self.scaled.grad_scale = divisor
        try:
            partition.apply(self.scaled.step, any_unused=any_unused)
        finally:
            self.scaled.grad_scale = None

    def lr(self) -> tuple[float, ...]:
        """Return the learning rate of each parameter group; 0 for a group without one."""
        return tuple(float(group.get("lr", 0.0)) for group in self.optimizer.param_groups)


@final
@attrs.define(eq=False)
class NoOptimizer:
    """Optimizer slot of engines that only run forward; an update raises ValueError."""

    optimizer: None = None
    scaled: None = None

    def update(self, partition: zpartition.Partition, divisor: Tensor | None, *, any_unused: bool) -> None:
        raise ValueError(
            "step() needs an optimizer, and this engine has none: pass optimizer= to initialize(), or add an "
            '"optimizer" section to the config'
        )

    def lr(self) -> tuple[float, ...]:
        """Return (): there are no groups."""
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
    """Feature, as checkpoints use it."""

    @property
    def name(self) -> str: ...  # "": no state
    def state_dict(self) -> Mapping[str, Any]: ...
    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]: ...
    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]: ...
    def tensors(self) -> Iterator[zpartition.Shard | zpartition.LazyShard]: ...
    def tensors_to_fill(self, *, weights_only: bool) -> Iterator[zpartition.Shard]: ...
    def reset_tensors(self) -> None: ...


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
    drift: float  # 0 if ranks agree
    num_unused: int  # parameters without gradient, summed over ranks
    loss: float  # mean over micro-steps and ranks
    remainder: float  # remaining divisor of weighted losses; 1 without weights, 0 if all weights are 0


class Inspect(Protocol):
    """Inspects the gradients once; see `zprecision.inspect`."""

    def __call__(
        self, grads: Sequence[Tensor], *, extra: Tensor | Sequence[float], beside: Tensor
    ) -> zprecision.GradientStats: ...


@attrs.frozen(kw_only=True, eq=False)
class Parts:
    """Parts of an engine, chosen by `assemble`."""

    world: zcomm.World
    groups: zcomm.Groups  # process groups of the ranks
    partition: zpartition.Partition
    scaler: zprecision.Scaler
    optimizer: OptimizerSlot
    scheduler: LRScheduleSlot
    runner: Runner
    telemetry: TelemetrySlot
    inspect: Inspect
    divisor: Callable[[Numbers], Tensor | None]  # divisor of the gradients; None: 1
    drift: Drift  # comparison of ranks at each boundary
    overflow_policy: OverflowPolicy
    exchange: Callable[[Any], list[Any]]  # all-gathers a value of each rank
    checkpoints: CheckpointSlot
    checkpointing: Callable[[], Checkpointing]  # returns the same one each time
    loader: Any  # zengine loader, or None if the caller has the data
    client_scheduler: Any  # lr_scheduler for the caller; None without one

    def num_late(self, stats: zprecision.GradientStats) -> int:
        """Return the number of buckets with gradients that have not been sent, summed over ranks."""
        return int(stats.numbers[2])

    def read(self, stats: zprecision.GradientStats, losses: StepLoss) -> Numbers:
        """Return the numbers of one boundary on the host, before anything changes."""
        norm, drift, _, unused, loss, weight, num_weighted, scale = stats.numbers
        remainder = losses.remainder(weight, num_weighted)
        return Numbers(
            is_finite=stats.finite,
            norm=norm,
            scale=scale,
            drift=drift,
            num_unused=int(unused),
            loss=loss / remainder if remainder else 0.0,
            remainder=remainder,
        )

    def skip_reason(self, numbers: Numbers, losses: StepLoss) -> SkipReason:
        """Return why the update is skipped; falsy if it is applied."""
        if numbers.remainder == 0:
            return SkipReason("the weights of all losses of the step are 0, so their mean is undefined")
        return self.overflow_policy(numbers.is_finite, self.partition, losses.is_finite)

    def report(self, clock: Clock, numbers: Numbers, lr: tuple[float, ...], skip: SkipReason) -> StepReport:
        """Return the report of the boundary that the clock has just counted."""
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
        """Release hooks, buffers and files; the world stays, since others may use it."""
        with contextlib.ExitStack() as stack:  # raises an error of a background save after closing everything
            stack.callback(self.checkpoints.close)
            stack.callback(self.telemetry.close)
            stack.callback(self.runner.close)
            self.partition.close()


@attrs.frozen(eq=False)
class Run:
    """State of an engine for features, checkpoints and exports, which never get the engine itself.

    The engine replaces it when `plan` changes (`set_train_batch_size`); the other members stay the same.
    """

    module: nn.Module
    parts: Parts
    plan: Plan
    clock: Clock
    losses: StepLoss

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Optimizer whose groups hold this rank's shards."""
        return self.parts.optimizer.optimizer

    @property
    def micro_batch_size(self) -> int:
        """Present number of samples of one forward on one rank."""
        return self.clock.samples_per_micro_step // self.plan.batch.replicas

    @property
    def device(self) -> torch.device:
        """Device of the module."""
        return self.parts.world.device

    def reducing(self, micro: MicroStep, *, is_weighted: bool = False) -> AbstractContextManager[None]:
        """Return the context of the backward of `micro`: the partition reduces gradients or keeps them local."""
        return self.parts.partition.micro_step(
            is_last=micro.is_last,
            is_local=micro.sync is Sync.LOCAL,
            is_scaled=is_weighted or self.plan.scales_losses,
        )
