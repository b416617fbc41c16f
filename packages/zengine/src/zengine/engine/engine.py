"""The training loop: forward, backward, step, checkpoints, close.

    loss = engine(batch)
    engine.backward(loss)
    report = engine.step()

`backward` divides the loss by the accumulation count, scales it and reduces gradients.  `step` counts the micro-step;
at a boundary it inspects the gradients once, skips the update (non-finite gradients) or updates this rank's shards,
publishes the weights and advances the LR schedule; it returns a `StepReport`.  Between boundaries it returns None.

`zengine.build.assemble` chooses the implementations; the engine calls them through the slots of `Parts`, each a
Protocol with a default, so nothing here asks if something is enabled.  Optional behaviour is a `Feature`: its hooks
default to the identity, and a feature that is off is absent.  Features, checkpoints and exports receive a `Run`,
never the engine.  DeepSpeed's names are in `zengine.deepspeed_engine`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import zprecision
from zengine.config import Plan
from zengine.engine import accumulation, module_attributes, optimizer_calls, torch_style
from zengine.engine.call_notes import note_backward, note_forward
from zengine.engine.clock import Boundary, Clock
from zengine.engine.feature import Feature
from zengine.engine.loss_weighting import StepLoss, Weight, check_loss, check_reached
from zengine.engine.memory_errors import explains_memory
from zengine.engine.parts import Parts, Run
from zengine.step_report import StepReport

E = TypeVar("E", bound="Engine")


class Engine(nn.Module):
    """Trains `module` by `plan`; `zengine.initialize` makes one.

    Attributes that the engine does not have are the module's (`engine.generate`).

    Invariant: between calls the parameters of `module` have the newest weights on every rank.
    """

    def __init__(self, module: nn.Module, parts: Parts, plan: Plan, features: tuple[Feature, ...] = ()) -> None:
        super().__init__()
        self.module = module
        clock = Clock(
            accumulation=plan.batch.accumulation,
            samples_per_micro_step=plan.batch.micro_batch_size * plan.batch.replicas,
            uneven_batch=sum(step.batch for step in plan.batch.uneven),
            boundary=Boundary.COUNTED if plan.managed_accumulation else Boundary.FORCED,
        )
        losses = StepLoss(clock, parts.world.device, plan.parallel.gradient_ranks, parts.exchange)
        for step in plan.batch.uneven:
            losses.factors = step.factors(parts.groups.get_data_parallel_rank())
        self._run = Run(module, parts, plan, clock, losses)
        self._features: tuple[Feature, ...] = ()
        self._last_report: StepReport | None = None
        for feature in features:
            self.add_feature(feature)

    # -- the loop --------------------------------------------------------------------------------

    @explains_memory("forward()")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and return its output unchanged.

        Raises:
            CallOrderError: the engine is closed.
        """
        parts = self.parts
        self.clock.forward(with_grad=torch.is_grad_enabled())
        with parts.telemetry.span("forward"):
            for feature in self._features:
                args, kwargs = feature.forward_begin(args, kwargs)
            try:
                output = parts.runner.forward(self.module, args, kwargs)
            except Exception as error:
                note_forward(error, self.module, args, kwargs)
                raise
            for feature in self._features:
                output = feature.forward_end(output)
        return output

    @explains_memory("backward()")
    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *, weight: Weight | None = None
    ) -> Tensor:
        """Compute and reduce gradients of `loss` (a scalar: the mean over this rank's micro-batch).

        loss: from `engine(...)`, or from the module itself (`engine.module(x)`, `engine.compute_loss(x)`).
        weight: number of units (e.g. tokens) in the mean of the loss.  The step's gradient is then the mean over the
            units of all micro-steps and ranks, however they are distributed; all ranks pass a weight, or none does.

        Returns the loss's contribution to the step, detached: divided by the accumulation count (unless
        `scale_wrt_gas` is False), or weighted, see loss_weighting.py.  Gradients of several calls before `step` add
        up.

        Raises:
            CallOrderError: the engine is closed, or would add to gradients of a plain backward.
            ValueError: the loss is not a scalar, has no graph, or reaches no parameter of this engine; or only some
                backwards of a step have a weight.
        """
        run, parts = self._run, self.parts
        reducing = partial(run.reducing, is_weighted=weight is not None)
        with run.clock.backward() as micro, parts.telemetry.span("backward"), reducing(micro):
            check_loss(loss)
            torch_style.check_unmixed(run, micro)
            for feature in self._features:
                loss = feature.backward_begin(micro, loss)
            share = run.losses.share(loss, micro, weight, divides=scale_wrt_gas)
            try:
                torch.autograd.backward(parts.scaler.scale(share), retain_graph=retain_graph)
            except RuntimeError as error:
                note_backward(error)
                raise
            check_reached(parts.partition)
        share = share.detach()
        run.losses.add(share)
        for feature in self._features:
            feature.backward_end(micro)
        return share

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepReport | None:
        """End the micro-step; at a boundary update the weights and return the report, else None.

        `lr_kwargs` are passed to the schedule's `step` (a metric, say).

        Raises:
            CallOrderError: there was no backward before.
            LossScaleExhausted: fp16 gradients overflow although the scale is at its floor.
            RanksDisagree: options, trained parameters or batches differ between ranks that must agree.
        """
        return self._end_micro_step(partial(self.parts.scheduler.step, **dict(lr_kwargs or {})))

    @explains_memory("step()")
    def _end_micro_step(self, step_lr_schedule: Callable[[], object]) -> StepReport | None:
        """Do the work of `step`; `step_lr_schedule` is called after an applied update."""
        parts, report = self.parts, None
        torch_style.accept_plain_gradients(self._run)
        micro = self.clock.end_micro_step()
        with parts.telemetry.span("step"):
            if micro.is_last:
                with self.clock.update(), parts.partition.zero_grad_on_exit():
                    report = self._update(step_lr_schedule)
        parts.telemetry.micro_step_end()
        if report is not None:
            self._finish_step(report)
        return report

    def _update(self, step_lr_schedule: Callable[[], object]) -> StepReport:
        """Run a boundary: reduce, inspect, update, count."""
        run, parts, clock = self._run, self.parts, self.clock
        for feature in self._features:
            feature.step_begin()
        # 1. reduce the last gradients; all-reduce norm, overflow, loss and the check that ranks agree, in one message
        stats = self._inspect(any_late=False)
        # 2. once more, if that message says that some gradients arrived after their bucket was sent
        if parts.num_late(stats):
            stats = self._inspect(any_late=True)
        numbers = parts.read(stats, run.losses)
        parts.drift.check(numbers.drift)
        lr = parts.optimizer.lr()
        # 3. skip the update, or apply it with loss scale, loss weights and clipping in one divisor
        skip = parts.skip_reason(numbers, run.losses)
        if not skip:
            divisor = parts.divisor(numbers)
            parts.optimizer.update(parts.partition, divisor, any_unused=numbers.num_unused > 0)
            step_lr_schedule()
        # 4. update scaler and counters
        parts.scaler.update(stats.found_inf)
        clock.end_step(applied=not skip)
        report = self.__dict__["_last_report"] = parts.report(
            clock, numbers, lr, skip
        )  # not nn.Module's setter: 3 us
        skip.raise_if_fatal(clock.steps)
        return report

    def _inspect(self, *, any_late: bool) -> zprecision.GradientStats:
        """Reduce and inspect the gradients; any_late: see `Partition.finish_gradients`."""
        run, partition = self._run, self.parts.partition
        gradients = partition.finish_gradients(any_late=any_late)
        for feature in self._features:
            feature.gradients_ready(partition)
        num_unused = partition.num_unused()
        drift = self.parts.drift.number(self.clock.steps, any_unused=num_unused > 0)
        extra = run.losses.statistics(drift, partition.num_late(), num_unused)
        return self.parts.inspect(gradients, extra=extra, beside=self.parts.scaler.factor)

    def _finish_step(self, report: StepReport) -> None:
        self.parts.telemetry.step_end(report)
        for feature in self._features:
            feature.step_end(report)

    # -- variants of the loop --------------------------------------------------------------------

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss, divided by the micro-steps and multiplied by the loss scale, for your own backward.

        Call `engine.scale(loss).backward()`.  loss: the mean over this rank's micro-batch.  Exactly one backward of
        the result is legal.  Add terms to `loss`, not to the result.

        Raises:
            CallOrderError: the engine is closed.
            ValueError: the loss is not a scalar, or has no graph.
        """
        return torch_style.scale(self._run, self._features, loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank inside, without communication; for all ranks, at every stage.

        The next backward outside, or `step`, sends their sum.  This costs a whole gradient in the parameters' dtype
        on each rank, also at stages 2 and 3, which otherwise keep a part; and the sum over micro-steps is rounded to
        that dtype.  `step` raises at a boundary inside.
        """
        return self.clock.local()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients of other origin (another engine's backward); `step` drops its own.

        Raises:
            CallOrderError: called within a step, whose earlier gradients would be lost.
        """
        accumulation.zero_grad(self._run)

    def restart_step(self) -> None:
        """Drop the gradients of the step so far and begin it again; all ranks call."""
        accumulation.restart_step(self._run)

    def _optimizer_step(self) -> None:
        """Do the work of `optimizer.step()`: `step` without the learning-rate schedule, which the caller steps."""
        if optimizer_calls.is_step_due(self._run):
            self._end_micro_step(lambda: None)

    def _optimizer_zero_grad(self) -> None:
        """Do the work of `optimizer.zero_grad()`: drop plain gradients, and those of a step that has just begun."""
        if optimizer_calls.drop_plain_gradients(self._run):
            self.zero_grad()

    # -- checkpoints: every rank calls -----------------------------------------------------------

    @explains_memory("save_checkpoint()", votes=True)
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> str:
        """Save the whole run; return the checkpoint's folder.

        Within a step it saves the state after the last one, with a warning: gradients are not saved, and a run that
        resumes begins the step again.

        tag: default: global_step<N>.
        client_state: numbers, strings, lists, dicts, tensors and paths, which `load_checkpoint` returns; rank 0's is
            saved.
        exclude_frozen_parameters: omit parameters that require no gradient (e.g. a base model under adapters); a load
            keeps the module's.

        Raises:
            ValueError: `save_dir` is empty.
            TypeError: `client_state` holds another type.
            zckpt.CheckpointError: any rank failed; on every rank.  Earlier checkpoints are unchanged.
        """
        state, trained_only = client_state or {}, exclude_frozen_parameters
        folder = self.parts.checkpoints.save(
            self._run, self._features, save_dir, tag, state, latest=save_latest, trained_only=trained_only
        )
        for feature in self._features:
            feature.checkpoint_saved(save_dir)
        return folder

    @explains_memory("load_checkpoint()", votes=True)
    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Restore a run saved by `save_checkpoint`, at any world size and stage; return (folder, client state).

        tag: default: the newest.

        Raises:
            ValueError: `custom_load_fn` is given; in DeepSpeed it copies a whole state dict, which no rank has here.
            zckpt.CheckpointError: on every rank: no checkpoint, a damaged one, or one of another run; the engine is
                unchanged.  If reading fails after tensors have changed, the error says so, and other calls raise
                `HalfLoaded` until a load restores everything.
        """
        if custom_load_fn is not None:
            raise ValueError(
                "load_checkpoint(custom_load_fn=...) is not supported: no rank holds a whole state dict while it "
                "loads. Read it with zckpt.load(), change it, and pass it to engine.load_state_dict()."
            )
        return self.parts.checkpoints.load(
            self._run,
            self._features,
            load_dir,
            tag,
            strict=load_module_strict,
            module_only=load_module_only,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
        )

    def wait_for_checkpoint(self) -> None:
        """Wait until the background save ("async_save") is durable.

        Raises:
            zckpt.CheckpointError: it failed; on every rank.  Earlier checkpoints are unchanged.
        """
        self.parts.checkpoints.wait()

    def restore_from_memory(self) -> dict[str, Any]:
        """Restore the newest `save_checkpoint` of "async_save" from its copy in host memory; return its client_state.

        Restores weights, optimizer, schedule, scale, counters, random state and data order, after a bad step for
        example.

        Raises:
            ValueError: there is no copy.
            zckpt.CheckpointError: the copy no longer fits this engine, which is unchanged.
        """
        return self.parts.checkpoints.restore_from_memory(self._run, self._features)

    def load_weights(
        self, path: str | os.PathLike[str], *, strict: bool = True, like: nn.Module | None = None
    ) -> None:
        """Load weights and masters from a `.safetensors`, a `.pt`, or a Hugging Face folder.

        Each rank reads only its own parts, however the model is split.  Names are the module's, or those of
        Transformers' folders for such a model, which may store stacked experts one by one.

        strict: if False, missing weights keep their values, and unknown names are ignored.
        like: a Transformers model of that folder with the module's names (the meta device is enough), for stages of a
            pipeline, which are not Transformers models themselves.

        Raises, on every rank and with nothing loaded:
            ValueError: names or shapes do not fit the module.
            CheckpointError: a rank cannot read the files, a checksum differs, or Transformers' conversion cannot run
                on parts of tensors.
        """
        self.parts.checkpoints.load_weights(self._run, path, strict=strict, like=like)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # three overloads
        """Return the module's state dict under its own names.

        For a module that is split over ranks it is the whole state dict on every rank; all ranks call, without
        arguments.

        Raises:
            TypeError: arguments are given, and the module is split.
        """
        return self.parts.checkpoints.state_dict(self._run, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy rank 0's weights (also with `assign`), and masters at the full precision given; all ranks call.

        If the module is split, each rank uses its parts of the whole state dict.
        """
        return self.parts.checkpoints.load_state_dict(self._run, state_dict, strict=strict)

    # -- members ---------------------------------------------------------------------------------

    @property
    def parts(self) -> Parts:
        """Implementations in the engine's slots."""
        return self._run.parts

    @property
    def plan(self) -> Plan:
        """Resolved plan; `print(engine.plan)` lists every value with its origin."""
        return self._run.plan

    @property
    def clock(self) -> Clock:
        """Phase and counters."""
        return self._run.clock

    @property
    def last_report(self) -> StepReport | None:
        """Report of the last boundary; None before the first."""
        return self._last_report

    def add_feature(self, feature: Feature) -> None:
        """Attach `feature` after the present ones."""
        feature.attach(self._run)
        self._features = (*self._features, feature)

    def paused(self) -> AbstractContextManager[None]:
        """Exclude the time of the block (validation, sampling) from the throughput."""
        return self.parts.telemetry.paused()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Time the block as a phase: `with engine.span("data"): batch = next(batches)`."""
        return self.parts.telemetry.span(name)

    def report_tokens(self, num_tokens: int) -> None:
        """Add this rank's tokens of the running step, if forward's inputs do not show them; calls add up."""
        self.parts.telemetry.report_tokens(num_tokens)

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute (`engine.generate`)."""
        return module_attributes.lookup(self, name)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove hooks, buffers and writers; the module keeps its weights (at stage 3 all ranks call).  Idempotent.

        A caller's optimizer keeps its shards and their state, and cannot be used again.
        """
        self.clock.close()
        with ExitStack() as stack:  # raises errors after closing everything; the parts are last
            stack.callback(self.parts.close)
            while self._features:
                stack.callback(self._features[0].close)
                self._features = self._features[1:]

    def __enter__(self: E) -> E:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
