"""The engine of a pipeline: the same parts and boundary, with whole batches in place of forward and backward.

    engine, *_ = zengine.initialize(model=PipelineModule(layers, num_stages=2, loss_fn=...), config=...)
    loss = engine.train_batch(iterator)                # of (inputs, labels), one for each micro-batch
    loss = engine.eval_batch(iterator)

A rank holds some of the layers, so forward of a part is no model, and which micro-batch is next is the schedule's
business: `forward`, `backward` and `step` say so.  `train_batch` is one step: it takes gradient_accumulation_steps
micro-batches through all stages, and then does what `step` does at a boundary (`Engine._update`).  Norm, overflow and
loss are those of the whole model, the same on all ranks: sums go over the stages too
(`zpartition.layout.model_parallel`), and the
last stage tells its losses to all.

Data is used on the ranks that hold the first and the last stage, alike.  The others need no iterator; where the
engine has a loader of its own they move along with what they are given, so that its position is the same everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import Tensor

from zengine.data import forever
from zengine.data.tree import map_tensors
from zengine.deepspeed_engine import DeepSpeedEngine
from zengine.engine.pipeline_passes import EnginePasses
from zpartition.pipeline import PipelineError, Recorder

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.engine.clock import MicroStep
    from zengine.engine.parts import Parts
    from zpartition.pipeline import Action, PipelineModule, PipelineRunner


__all__ = ["PipelineEngine"]

BatchFn = Callable[[Any], Any]
Observe = Callable[["Action", float, float], None]


@final
class PipelineEngine(DeepSpeedEngine):
    """Trains the stages of this rank; made by `zengine.initialize` for a `PipelineModule`.

    Invariant: `module.training` outside of `eval_batch` is as the caller left it.
    """

    module: PipelineModule

    def __init__(self, module: PipelineModule, parts: Parts, plan: Plan, pipeline: PipelineRunner) -> None:
        """pipeline: with `EnginePasses` over `parts`."""
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

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over gradient_accumulation_steps micro-batches; all ranks call.

        data_iter: yields (inputs, labels); kept for the next call.  Default: the last one, or `training_data`.

        Returns the mean loss over micro-batches and replicas, () float32, the same on every rank; what became of the
        step is in `last_report`.

        Raises:
            PipelineError: there are no data, or a micro-batch is no pair.
            ValueError: the data end within the batch; the loss is not a scalar or has no graph.
            StageFailed: another rank of the pipeline failed in this batch, and the message says in what.
            LossScaleExhausted: as `step` does.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.clock.require_open("train_batch")
        parts, count = self.parts, self.clock.accumulation
        self.train()
        with self.clock.batch() as micro, self.pipeline.abort_guard.guard("train_batch()"):
            try:
                batches = self._training(self._source("train_batch", self._batches), count)
                self._announce(micro)
                loss = self.pipeline.train_batch(batches, count, self._observe)
            except BaseException:
                parts.partition.zero_grad()
                raise
        self._run.losses.take(loss.item())
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
        """Forward alone over `num_micro_batches` (default: gradient_accumulation_steps); all ranks call.

        reduce_output: "avg" gives the mean loss over micro-batches and replicas; None that of each micro-batch of
            this replica, (num_micro_batches,).
        bcast_loss: every rank gets it; else those of the last stage, and the others None.
        compute_loss: False gives outputs of the last layer instead, which need no labels: a list, None elsewhere.
        return_logits: (loss, outputs) is returned.

        Raises PipelineError, ValueError and StageFailed as `train_batch`, and ValueError for another `reduce_output`.
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
                    losses = self._evaluated([loss for _, loss in found], count, is_mean=reduce_output == "avg")
        finally:
            self.module.train(training)
        outputs = [output for output, _ in found] if self.is_last_stage() else None
        if not compute_loss:
            return outputs
        told = losses if bcast_loss or self.is_last_stage() else None
        return (told, outputs) if return_logits else told

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Around one `train_batch`: the recorder's `timeline()` is what it took, on all ranks.  Collective.

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

    def _evaluated(self, losses: list[Tensor], count: int, *, is_mean: bool) -> Tensor:
        told = self.pipeline.share(losses, count)
        if not is_mean:
            return told.float()
        everybody = self.parts.exchange(told.mean().item())  # the replicas
        return torch.tensor(sum(everybody) / len(everybody), device=self.device)

    # -- data ------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Read training batches from `loader`, again and again."""
        self._batches = forever(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read training batches from `iterator` to its end."""
        self._batches = iterator

    def set_batch_fn(self, fn: BatchFn) -> None:
        """Let `fn` make (inputs, labels) of what the data yield."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Forget what shapes stages hand on; each batch begins so anyway."""
        self.pipeline.p2p.channels.forget_shapes()

    def is_first_stage(self) -> bool:
        """Return whether this rank holds the first layers."""
        return 0 in self.module.my_stages

    def is_last_stage(self) -> bool:
        """Return whether this rank holds the last layers, and so the loss."""
        return self.module.num_stages - 1 in self.module.my_stages

    @property
    def stage_id(self) -> int:
        """This rank's place along the pipeline, from 0."""
        return self.module.pipeline_position.rank

    @property
    def num_stages(self) -> int:
        """Ranks along the pipeline."""
        return self.module.pipeline_position.num_ranks

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a training batch."""
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
        """Micro-batches on the device."""
        for batch in source:
            pair = self._batch_fn(batch)
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                what = f"{len(pair)} values" if isinstance(pair, (tuple, list)) else f"a {type(pair).__name__}"
                raise PipelineError(
                    f"a micro-batch of a pipeline is a pair (inputs, labels), and the data have {what}: change what "
                    "they yield, or give a function to set_batch_fn()"
                )
            inputs, labels = (map_tensors(each, lambda tensor: tensor.to(self.device)) for each in pair)
            yield tuple(inputs) if isinstance(inputs, list) else inputs, labels

    def _training(self, source: Iterator[Any], count: int) -> Iterator[tuple[Any, Any]]:
        """The same, as features let a batch begin; ranks between the ends pass over what may be their loader's."""
        if self._reads:
            return (self._begun(pair) for pair in self._pairs(source))
        for _ in itertools.islice(source, 0 if self.parts.loader is None else count):
            pass
        self._begun(())
        return iter(())

    def _begun(self, pair: tuple[Any, ...]) -> Any:
        for feature in self._features:
            pair, _ = feature.forward_begin(pair, {})
        return pair

    def _announce(self, micro: MicroStep) -> None:
        """Let features know of the batch's first backward; losses of micro-batches are not theirs to change."""

        def first_backward() -> None:
            for feature in self._features:
                feature.backward_begin(micro, torch.zeros((), device=self.device))

        self._passes.announce = first_backward

    # -- what a pipeline has no use for ----------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a rank holds a part of the model."""
        self._refuse("forward", "train_batch(iterator), or eval_batch(iterator) to evaluate")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the schedule decides when."""
        self._refuse("backward", "train_batch(iterator)")

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> NoReturn:
        """Refused: a batch ends with it."""
        self._refuse("step", "train_batch(iterator), which ends with the optimizer's step")

    def _optimizer_step(self) -> NoReturn:
        """Refused: `optimizer.step()` likewise."""
        self._refuse("optimizer.step", "train_batch(iterator), which ends with the optimizer's step")

    def _refuse(self, name: str, instead: str) -> NoReturn:
        raise PipelineError(
            f"{name}() on a pipeline of {self.module.num_stages} stages: micro-batches go through the stages by a "
            f"schedule. Call {instead}."
        )
