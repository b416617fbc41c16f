"""Engine of a pipeline: the same parts and boundary, with whole batches in place of forward and backward.

    engine, *_ = zengine.initialize(model=PipelineModule(layers, num_stages=2, loss_fn=...), config=...)
    loss = engine.train_batch(iterator)                # of (inputs, labels), one for each micro-batch
    loss = engine.eval_batch(iterator)

A rank holds some of the layers, and the schedule chooses the next micro-batch, so `forward`, `backward` and `step`
raise.  `train_batch` is one step: it runs gradient_accumulation_steps micro-batches through all stages, and then does
the same as `step` at a boundary (`Engine._update`).  Norm, overflow and loss are those of the whole model on all
ranks: sums include the stages (`zpartition.layout.model_parallel`), and the last stage broadcasts its losses.

The ranks of the first and the last stage read the same data.  Other ranks need no iterator; if the engine has its own
loader they advance it too, so that its position is equal on all ranks.

`EnginePasses` runs a stage's forwards and backwards with the engine's runner, scaler and partition.  Each
micro-batch's backward is a round of the partition; only the last one of a batch sends, and it sends the sum
(`ReduceAt.BATCH`).  So ranks with the same stage exchange gradients once per batch at every ZeRO stage.  Inside the
schedule only stage 3's gathers wait for other ranks; their order is equal, since these ranks run the same actions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, final

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

import zpartition
from zengine.data import forever
from zengine.data.tree import map_tensors
from zengine.deepspeed_engine import DeepSpeedEngine
from zengine.engine.loss_weighting import check_loss
from zengine.engine.memory_errors import explains_memory
from zpartition.pipeline import Passes, PipelineError, PipelineRunner, Recorder

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.engine.clock import MicroStep
    from zengine.engine.parts import Parts
    from zpartition.pipeline import Action, PipelineModule

__all__ = ["EnginePasses", "PipelineEngine", "make_pipeline"]

BatchFn = Callable[[Any], Any]
Observe = Callable[["Action", float, float], None]


@final
class PipelineEngine(DeepSpeedEngine):
    """Trains the stages of this rank; `zengine.initialize` makes one for a `PipelineModule`.

    Invariant: `eval_batch` leaves `module.training` as it was.
    """

    module: PipelineModule
    grid: Any = None  # DeepSpeed's PipelineParallelGrid, if `deepspeed.initialize` made the engine

    def __init__(self, module: PipelineModule, parts: Parts, plan: Plan, pipeline: PipelineRunner) -> None:
        """Wrap `module`.  pipeline: a runner with `EnginePasses` over `parts`."""
        super().__init__(module, parts, plan)
        assert isinstance(pipeline.passes, EnginePasses)
        self._pipeline, self._passes = pipeline, pipeline.passes
        self._batch_fn: BatchFn = lambda batch: batch
        self._observe: Observe = lambda action, start, stop: None
        self._batches: Iterator[Any] | None = None if parts.loader is None else forever(parts.loader)

    @property
    def pipeline(self) -> PipelineRunner:
        """Runner that takes batches through the stages."""
        return self._pipeline

    # -- batches ---------------------------------------------------------------------------------

    @explains_memory("train_batch()")
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one optimizer step over gradient_accumulation_steps micro-batches; all ranks call.

        data_iter: yields (inputs, labels); kept for the next call.  Default: the previous one, or `training_data`.

        Returns the mean loss over micro-batches and replicas, () float32, equal on every rank; `last_report` has the
        report of the step.

        Raises:
            PipelineError: no data were given, or a micro-batch is not a pair.
            ValueError: the data end within the batch; the loss is not a scalar or has no graph.
            StageFailed: another rank of the pipeline failed in this batch; the message has its error.
            LossScaleExhausted: fp16 gradients overflow although the scale is at its floor.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.clock.require_open("train_batch")
        parts, count = self.parts, self.clock.accumulation
        self.train()
        with self.clock.batch() as micro, self.pipeline.abort_guard.guard("train_batch()"):
            try:
                batches = self._training_batches(self._source("train_batch", self._batches), count)
                self._before_backward(micro)
                loss = self.pipeline.train_batch(batches, count, self._observe)
            except BaseException:
                parts.partition.zero_grad()
                raise
        self._run.losses.set_mean(loss.item())
        with parts.telemetry.span("step"), self.clock.update(), parts.partition.zero_grad_on_exit():
            report = self._update(parts.scheduler.step)
        parts.telemetry.micro_step_end()
        self._finish_step(report)
        return torch.tensor(report.loss, device=self.device)

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run only forward over `num_micro_batches` (default: gradient_accumulation_steps); all ranks call.

        reduce_output: "avg" for the mean loss over micro-batches and replicas; None for the losses of this replica's
            micro-batches, (num_micro_batches,).
        bcast_loss: return the loss on every rank; otherwise only on the last stage, and None on others.
        compute_loss: if False, return the outputs of the last layer, which needs no labels: a list on the last stage,
            None on others.
        return_logits: return (loss, outputs).

        Raises:
            PipelineError, StageFailed: as `train_batch`.
            ValueError: as `train_batch`, and for another `reduce_output`.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(f'eval_batch(reduce_output={reduce_output!r}): give "avg" or None')
        self.clock.require_open("eval_batch")
        count, training = num_micro_batches or self.clock.accumulation, self.module.training
        self.module.eval()
        try:
            with self.parts.telemetry.paused(), self.pipeline.abort_guard.guard("eval_batch()"):
                source = self._source("eval_batch", data_iter)
                found = self.pipeline.evaluate(
                    self._pairs(source),
                    count,
                    compute_loss=compute_loss,
                    keep_outputs=return_logits or not compute_loss,
                )
                if compute_loss:
                    losses = self._reduce_losses([loss for _, loss in found], count, is_mean=reduce_output == "avg")
        finally:
            self.module.train(training)
        outputs = [output for output, _ in found] if self.is_last_stage() else None
        if not compute_loss:
            return outputs
        loss = losses if bcast_loss or self.is_last_stage() else None
        return (loss, outputs) if return_logits else loss

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record one `train_batch`; afterwards the recorder's `timeline()` has the times of all ranks.  Collective.

        with engine.recording() as recorder:
            engine.train_batch()
        measured = recorder.timeline()
        svg = comparison_svg(simulate_measured(engine.pipeline.schedule(engine.micro_batches), measured), measured)
        """
        before, recorder = self._observe, Recorder(self.module)
        self._observe = recorder
        try:
            yield recorder
        finally:
            self._observe = before

    def _reduce_losses(self, losses: list[Tensor], count: int, *, is_mean: bool) -> Tensor:
        shared = self.pipeline.share(losses, count)
        if not is_mean:
            return shared.float()
        means = self.parts.exchange(shared.mean().item())  # of the replicas
        return torch.tensor(sum(means) / len(means), device=self.device)

    # -- data ------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Read training batches from `loader`, repeatedly."""
        self._batches = forever(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read training batches from `iterator` to its end."""
        self._batches = iterator

    def set_batch_fn(self, fn: BatchFn) -> None:
        """Use `fn` to turn the items of the data into (inputs, labels)."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Forget the shapes of activations between stages; each batch starts that way anyway."""
        self.pipeline.p2p.channels.forget_shapes()

    def is_first_stage(self) -> bool:
        """Return True if this rank holds the first layers."""
        return 0 in self.module.my_stages

    def is_last_stage(self) -> bool:
        """Return True if this rank holds the last layers, and so the loss."""
        return self.module.num_stages - 1 in self.module.my_stages

    @property
    def stage_id(self) -> int:
        """Index of this rank in its pipeline, from 0."""
        return self.module.pipeline_position.rank

    @property
    def num_stages(self) -> int:
        """Number of ranks in a pipeline."""
        return self.module.pipeline_position.num_ranks

    @property
    def micro_batches(self) -> int:
        """Micro-batches per training batch."""
        return self.clock.accumulation

    @property
    def _reads(self) -> bool:
        return self.is_first_stage() or self.is_last_stage()

    def _source(self, call: str, source: Iterator[Any] | None) -> Iterator[Any]:
        if source is None and self._reads:
            raise PipelineError(
                f"{call}() has no data: pass an iterator of (inputs, labels)"
                + ", or training_data= to initialize(), or call set_dataloader()" * (call == "train_batch")
            )
        return iter(()) if source is None else source

    def _pairs(self, source: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield micro-batches on the device."""
        for batch in source:
            pair = self._batch_fn(batch)
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                what = f"{len(pair)} values" if isinstance(pair, (tuple, list)) else f"a {type(pair).__name__}"
                raise PipelineError(
                    f"a micro-batch of a pipeline is a pair (inputs, labels), and the data have {what}: change the "
                    "data, or pass a function to set_batch_fn()"
                )
            inputs, labels = (map_tensors(each, lambda tensor: tensor.to(self.device)) for each in pair)
            yield tuple(inputs) if isinstance(inputs, list) else inputs, labels

    def _training_batches(self, source: Iterator[Any], count: int) -> Iterator[tuple[Any, Any]]:
        """Yield micro-batches after the features' `forward_begin`; inner stages only advance their loader."""
        if self._reads:
            return (self._forward_begin(pair) for pair in self._pairs(source))
        for _ in itertools.islice(source, 0 if self.parts.loader is None else count):
            pass
        self._forward_begin(())
        return iter(())

    def _forward_begin(self, pair: tuple[Any, ...]) -> Any:
        for feature in self._features:
            pair, _ = feature.forward_begin(pair, {})
        return pair

    def _before_backward(self, micro: MicroStep) -> None:
        """Call the features' `backward_begin` before the batch's first backward; they cannot change its losses."""

        def first_backward() -> None:
            for feature in self._features:
                feature.backward_begin(micro, torch.zeros((), device=self.device))

        self._passes.before_backward = first_backward

    # -- calls that a pipeline does not have -----------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise PipelineError: a rank holds a part of the model."""
        self._raise_whole_batches("forward", "train_batch(iterator), or eval_batch(iterator) to evaluate")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise PipelineError: the schedule runs the backwards."""
        self._raise_whole_batches("backward", "train_batch(iterator)")

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> NoReturn:
        """Raise PipelineError: `train_batch` ends with the step."""
        self._raise_whole_batches("step", "train_batch(iterator), which ends with the optimizer's step")

    def _optimizer_step(self) -> NoReturn:
        """Raise PipelineError: `train_batch` ends with the step."""
        self._raise_whole_batches("optimizer.step", "train_batch(iterator), which ends with the optimizer's step")

    def _raise_whole_batches(self, name: str, instead: str) -> NoReturn:
        raise PipelineError(
            f"{name}() on a pipeline of {self.module.num_stages} stages: micro-batches go through the stages by a "
            f"schedule. Call {instead}."
        )


def make_pipeline(module: PipelineModule, parts: Parts, plan: Plan) -> PipelineRunner:
    """Return the runner that takes batches through the stages, with the passes of an engine of `parts`."""
    passes, dtype = EnginePasses(parts), plan.numerics.autocast
    if dtype != torch.float32:
        passes.autocast = functools.partial(torch.autocast, parts.world.device.type, dtype=dtype)
    settings, is_split = plan.pipeline, plan.parallel.degrees.tensor > 1
    activations, gradients = (
        zpartition.ModelParallelGroup.of(parts.groups.tensor()) if on and is_split else None
        for on in (settings.pipe_partitioned, settings.grad_partitioned)
    )
    return PipelineRunner.over(
        module, settings.schedule, device=parts.world.device, passes=passes, mp_groups=(activations, gradients)
    )


@final
@attrs.define(eq=False)
class EnginePasses(Passes):
    """Forward and backward of a stage with the parts of an engine."""

    parts: Parts
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # around the loss, as around forward
    before_backward: Callable[[], None] = lambda: None  # called once, before the first backward of a batch

    def forward(self, module: PipelineModule, stage: int, value: Any, around: Any) -> Any:
        """Run a stage as the engine's runner runs a module."""
        with self.parts.telemetry.span("forward"):
            return self.parts.runner.forward(module, (value,), {"stage": stage, "around": around})

    def loss(self, loss_fn: Callable[[Any, Any], Any], output: Any, labels: Any) -> Any:
        """Compute the loss inside autocast if forward runs there, so that losses of narrow outputs are in float32."""
        with self.autocast():
            return loss_fn(output, labels)

    def share(self, loss: Tensor, micro_batches: int) -> Tensor:
        """Return the loss divided by the micro-batches and scaled.  Raises ValueError for a loss without a graph."""
        check_loss(loss)
        return self.parts.scaler.scale(loss / micro_batches)

    @contextmanager
    def backward(self, *, is_last: bool) -> Iterator[None]:
        """Open a round of the partition; the last one of a batch sends."""
        before, self.before_backward = self.before_backward, lambda: None
        before()
        with self.parts.telemetry.span("backward"), self.parts.partition.micro_step(is_last=is_last):
            yield

    def whole(self, params: Iterable[Parameter]) -> AbstractContextManager[Any]:
        """Gather the parameters.  A collective of the ranks that hold the same stage."""
        return zpartition.gathered(list(params))
