"""The engine: a module that trains itself, five slots and one clock.

    loss = engine(batch)
    engine.backward(loss)
    report = engine.step()

`backward` divides the loss by the accumulation count and scales it; `step` counts the micro-step and, at a
boundary, inspects the gradients once, updates this rank's shards, publishes the weights and returns a
`StepReport`.  Between boundaries it returns None.

What varies lives in five slots (`Parts`), each a Protocol with an identity implementation, so nothing here asks
whether something is enabled.  Everything optional is a feature with hooks that default to the identity.
What users may look up is in `facts`; how a step is made up is in `accumulation`, `weighing` and `torch_style`; what
goes to disk is in `persistence`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from zengine.accumulation import EngineAccumulation
from zengine.clock import Boundary, Clock
from zengine.compiling import EngineCompiling
from zengine.config import Plan
from zengine.facts import EngineFacts
from zengine.features import Feature
from zengine.losses import check_loss, check_reached
from zengine.optimizer_calls import EngineOptimizerCalls
from zengine.parts import Parts
from zengine.persistence import EnginePersistence
from zengine.report import StepReport
from zengine.torch_style import EngineTorchStyle
from zengine.weighing import StepLoss, Weight


class Engine(  # type: ignore[misc]  # state_dict has one signature here, three overloads in nn.Module
    EngineFacts,
    EngineAccumulation,
    EngineTorchStyle,
    EngineOptimizerCalls,
    EngineCompiling,
    EnginePersistence,
    nn.Module,
):
    """Trains `module` as `plan` says; made by `zengine.initialize`.

    Invariant: `module`'s parameters always show the newest weights, on every rank, when no method is running.
    """

    def __init__(self, module: nn.Module, parts: Parts, plan: Plan, features: tuple[Feature, ...] = ()) -> None:
        super().__init__()
        self.module = module
        self.parts = parts
        self.plan = plan
        self._features = features
        self.clock = Clock(
            accumulation=plan.batch.accumulation,
            samples_per_micro_step=plan.batch.micro_batch_size * plan.batch.replicas,
            boundary=Boundary.COUNTED if plan.managed_accumulation else Boundary.FORCED,
        )
        self._losses = StepLoss(self.clock, parts.world.device, plan.parallel.gradient_ranks, parts.exchange)
        self.last_report: StepReport | None = None
        for feature in features:
            feature.attach(self)

    def add_feature(self, feature: Feature) -> None:
        """Hook `feature` in, after those that are there."""
        feature.attach(self)
        self._features = (*self._features, feature)

    # -- the loop --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; its value is returned untouched.

        Raises:
            CallOrderError: the engine is closed.
        """
        self.clock.forward(with_grad=torch.is_grad_enabled())
        with self.parts.telemetry.span("forward"):
            for feature in self._features:
                args, kwargs = feature.forward_begin(args, kwargs)
            output = self.parts.runner.forward(self.module, args, kwargs)
            for feature in self._features:
                output = feature.forward_end(output)
        return output

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *, weight: Weight | None = None
    ) -> Tensor:
        """Compute and reduce gradients of `loss` (a scalar: the mean over this rank's micro-batch).

        weight: how many units (tokens, say) the loss is a mean of.  The step's gradient is then the mean over the
            units of all micro-steps and ranks, however unevenly they are spread; all ranks give one, or none.

        Returns what the loss contributes to the step, detached: divided by the accumulation count (unless
        `scale_wrt_gas` is False), or weighted, see weighing.py.  May be called several times before `step`; the
        gradients add up.

        Raises:
            CallOrderError: no forward came before.
            ValueError: the loss is not a scalar, has no graph, or reaches no parameter of this engine; or some
                backwards of a step have a weight and others none.
        """
        parts = self.parts
        reducing = functools.partial(self.reducing, is_weighted=weight is not None)
        with self.clock.backward() as micro, parts.telemetry.span("backward"), reducing(micro):
            check_loss(loss)
            for feature in self._features:
                loss = feature.backward_begin(micro, loss)
            share = self._losses.share(loss, micro, weight, divides=scale_wrt_gas)
            torch.autograd.backward(parts.scaler.scale(share), retain_graph=retain_graph)
            check_reached(parts.partition)
        share = share.detach()
        self._losses.add(share)
        for feature in self._features:
            feature.backward_end(micro)
        return share

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepReport | None:
        """End the micro-step; at a boundary update the weights and return the report, else None.

        `lr_kwargs` are passed to the schedule's `step` (a metric, say).

        Raises:
            CallOrderError: no backward came before.
            LossScaleExhausted: fp16 gradients overflow although the scale is at its floor.
            RanksDisagree: options, what is trained or batches differ between ranks that must have them alike.
        """
        return self.end_micro_step(functools.partial(self.parts.scheduler.step, **dict(lr_kwargs or {})))

    def end_micro_step(self, advance: Callable[[], object]) -> StepReport | None:
        """`step`, with `advance` for the learning-rate schedule: called after an update that was applied."""
        parts, report = self.parts, None
        self.take_plain_gradients()
        micro = self.clock.end_micro_step()
        with parts.telemetry.span("step"):
            if micro.is_last:
                with self.clock.update(), parts.partition.forgetting():
                    report = self._update(advance)
        parts.telemetry.micro_step_end()
        if report is not None:
            parts.telemetry.step_end(report)
            for feature in self._features:
                feature.step_end(report)
        return report

    def _update(self, advance: Callable[[], object]) -> StepReport:
        """The boundary: inspect once, judge, update, publish, forget the gradients."""
        parts = self.parts
        for feature in self._features:
            feature.step_begin()
        gradients = parts.partition.finish_gradients()
        for feature in self._features:
            feature.gradients_ready(parts.partition)
        num_unused = parts.partition.num_unused()
        drift = parts.drift.number(self.clock.steps, any_unused=num_unused > 0)
        stats = parts.inspect(gradients, extra=self._losses.statistics(num_unused, drift))
        numbers = parts.read(stats, self._losses)
        parts.drift.check(numbers.drift)
        lr = parts.optimizer.lr()
        fault = parts.verdict(numbers, self._losses)
        if not fault:
            divisor = parts.divisor(numbers)
            parts.optimizer.update(parts.partition, divisor, any_unused=numbers.num_unused > 0)
            advance()
        parts.scaler.update(stats.found_inf)
        self.clock.end_step(applied=not fault)
        self.last_report = parts.report(self.clock, numbers, lr, fault)
        fault.raise_if_fatal(self.clock.steps)
        return self.last_report

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove hooks, buffers, writers; the module keeps its weights (at stage 3 all ranks call). Idempotent.

        A caller's optimizer stays with the engine: it keeps its shards and their state, and cannot be used again.
        """
        self.clock.close()
        with ExitStack() as stack:  # whatever fails is told when all is given back; the parts go last
            stack.callback(self.parts.close)
            while self._features:
                stack.callback(self._features[0].close)
                self._features = self._features[1:]

    destroy = close

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
