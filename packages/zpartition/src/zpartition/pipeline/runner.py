"""Execution of a schedule: one batch of micro-batches through the stages of this rank.

The runner executes any `Schedule` and knows no optimizers.  It leaves gradients where backward leaves them, so plain
torch optimizers work as without a pipeline.  An engine that partitions weights, scales losses or takes measurements
overrides a single forward and backward (`Passes`): a ZeRO stage wraps each backward, and only the last one of a batch
communicates.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.pipeline.abort import AbortGuard
from zpartition.pipeline.deferral import DeferredWeightGrads, DeferWeightGrads
from zpartition.pipeline.module import Around, PipelineModule
from zpartition.pipeline.p2p import P2P, TiedWeights
from zpartition.pipeline.schedule import Action, ActionKind, Schedule, forward_only, make_schedule

_make_schedule_once = functools.lru_cache(maxsize=16)(make_schedule)  # every batch asks
Observe = Callable[[Action, float, float], None]
Batches = Iterator[tuple[Any, Any]]  # (input of the first layer, labels), one for each micro-batch


class Passes:
    """Execution of a forward and a backward: the identity, to be overridden."""

    def forward(self, module: PipelineModule, stage: int, value: Any, around: Around) -> Any:
        """Return the output of one stage."""
        return module(value, stage, around)

    def loss(self, loss_fn: Callable[[Any, Any], Any], output: Any, labels: Any) -> Any:
        """Return the loss of an output."""
        return loss_fn(output, labels)

    def share(self, loss: Tensor, micro_batches: int) -> Tensor:
        """Scale the loss of a micro-batch, () or (1,), so that the gradients of all add up to those of the mean."""
        return loss / micro_batches

    def backward(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Context around each backward of this rank; `is_last` of the batch."""
        return contextlib.nullcontext()

    def whole(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """Context around reading weights outside of a module."""
        return contextlib.nullcontext()


@final
@attrs.define(eq=False)
class _InFlight:
    """Tensors of one micro-batch at one stage between its forward and its backward."""

    inputs: Any
    output: Any  # at the last stage the loss
    deferred: DeferredWeightGrads = attrs.field(factory=DeferredWeightGrads)


@final
@attrs.define(eq=False)
class PipelineRunner:
    """Runs the schedule of `module`'s pipeline on this rank."""

    module: PipelineModule
    schedule_name: str
    p2p: P2P
    tied: TiedWeights
    passes: Passes
    abort_guard: AbortGuard = attrs.field(
        default=attrs.Factory(lambda self: AbortGuard(self.module), takes_self=True)
    )
    splits_backward: bool = False  # weight gradients are separate actions
    in_flight: dict[tuple[int, int], _InFlight] = attrs.field(factory=dict)

    @classmethod
    def over(
        cls,
        module: PipelineModule,
        schedule: str = "1f1b",
        group: ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        passes: Passes | None = None,
        mp_groups: tuple[ModelParallelGroup | None, ModelParallelGroup | None] = (None, None),
    ) -> PipelineRunner:
        """Create a runner of the named schedule; see `make_schedule`.

        group: the ranks of the pipeline, first stage first; None: those of `module`.
        mp_groups: tensor ranks that each send a part of activations, and of gradients; see channels.py.
        Raises ScheduleError if the schedule does not fit the stages.
        """
        per_rank = module.num_stages // module.pipeline_position.num_ranks
        make_schedule(schedule, module.pipeline_position.num_ranks, module.pipeline_position.num_ranks, per_rank)
        own = module.stage_group().group if group is None else group
        p2p = P2P.of(module, own, torch.device(device), mp_groups)
        return cls(module, schedule, p2p, TiedWeights(module, p2p.channels), passes or Passes())

    def schedule(self, micro_batches: int) -> Schedule:
        """Return the schedule of a batch of `micro_batches`."""
        ranks = self.module.pipeline_position.num_ranks
        return _make_schedule_once(self.schedule_name, ranks, micro_batches, self.module.num_stages // ranks)

    def train_batch(
        self, batches: Batches, micro_batches: int, observe: Observe = lambda action, start, stop: None
    ) -> Tensor:
        """Run forward and backward of a batch; returns the mean loss, detached, on every rank of the pipeline.

        batches: read, as needed, on the ranks of the first and the last stage, which must get the same data.
        observe: called with each action, the time when its inputs were available and its end, by time.perf_counter.
        Gradients are those of the mean over micro-batches.  The loss is () float64.
        """
        with self._batch("the beginning of a batch"):
            losses = self._train(batches, micro_batches, observe)
            self.p2p.end()
            return self.share(losses, micro_batches).sum()

    def _train(self, batches: Batches, micro_batches: int, observe: Observe) -> list[Tensor]:
        """Execute the schedule; returns the divided losses on the last stage, [] on the others."""
        schedule = self.schedule(micro_batches)
        actions = schedule.ranks[self.module.pipeline_position.rank]
        self.splits_backward = any(action.kind is ActionKind.WEIGHT for rank in schedule.ranks for action in rank)
        feed, losses = _MicroBatches(batches, self.module), list[Tensor]()
        last = len(actions) - 1 if not self.tied.has_copies else -1  # every rank's list ends with a backward
        self._broadcast_tied()
        self.p2p.begin(schedule)
        for number, action in enumerate(actions):
            self.abort_guard.start_action(action)
            self.p2p.proceed(number)
            needed = self._receive_input(action, feed)
            start = time.perf_counter()
            if action.kind is ActionKind.FORWARD:
                losses += [loss / micro_batches for loss in self._forward(action, needed, feed)]
            else:
                with self.passes.backward(is_last=number == last):
                    self._backward(action, needed, micro_batches)
            observe(action, start, time.perf_counter())
        self.p2p.proceed(len(actions))
        self.abort_guard.current = "the end of a batch"
        with self.passes.backward(is_last=True) if self.tied.has_copies else contextlib.nullcontext():
            self.tied.reduce_gradients()
        return losses

    def eval_batch(self, batches: Batches, micro_batches: int, compute_loss: bool = True) -> Any:
        """Run forward only: returns the mean loss on every rank, or the outputs of the last layer on its rank."""
        with self._batch("the beginning of an evaluation"):
            found = self.evaluate(batches, micro_batches, compute_loss=compute_loss, keep_outputs=not compute_loss)
            if compute_loss:
                return self.share([loss for _, loss in found], micro_batches).mean()
            return [output for output, _ in found]

    @torch.no_grad()
    def evaluate(
        self, batches: Batches, micro_batches: int, *, compute_loss: bool = True, keep_outputs: bool = True
    ) -> list[tuple[Any, Any]]:
        """Run forward only: returns (output, loss) of each micro-batch on the last stage's rank, [] on the others.

        A value that was not requested is None.
        """
        position = self.module.pipeline_position
        schedule = forward_only(position.num_ranks, micro_batches, len(self.module.my_stages))
        feed, found = _MicroBatches(batches, self.module), list[tuple[Any, Any]]()
        with self._batch("the beginning of an evaluation"):
            self._broadcast_tied()
            self.p2p.begin(schedule)
            for number, action in enumerate(schedule.ranks[position.rank]):
                self.abort_guard.start_action(action)
                self.p2p.proceed(number)
                needed = self._receive_input(action, feed)
                output = self.passes.forward(self.module, action.stage, needed, contextlib.nullcontext)
                if action.stage == self.module.num_stages - 1:
                    labels = feed.labels(action.micro)  # read in any case: the ranks' data stay alike
                    loss = self._loss(output, labels) if compute_loss else None
                    found.append((output if keep_outputs else None, loss))
                else:
                    self.p2p.send_activation(action.stage + 1, action.micro, output)
            self.p2p.proceed(len(schedule.ranks[position.rank]))
            self.abort_guard.current = "the end of an evaluation"
            self.p2p.end()
        return found

    @contextlib.contextmanager
    def _batch(self, call: str) -> Iterator[None]:
        """Guard a batch: a failure is sent to all ranks, and no state remains."""
        try:
            with self.abort_guard.guard(call):
                yield
        except BaseException:
            self.in_flight.clear()
            self.p2p.abort()
            raise

    def share(self, losses: list[Tensor], micro_batches: int) -> Tensor:
        """Broadcast the last stage's losses to all ranks of the pipeline: (micro_batches,) float64."""
        shared = torch.zeros(micro_batches, dtype=torch.float64, device=self.p2p.channels.device)
        for micro, loss in enumerate(losses):
            shared[micro] = loss.detach().reshape(())
        if self.module.pipeline_position.num_ranks > 1:
            source = (self.module.num_stages - 1) % self.module.pipeline_position.num_ranks
            self.p2p.channels.broadcast(shared, source)
        return shared

    def _broadcast_tied(self) -> None:
        params = [param for module in self.module.owned.values() for param in module.parameters()]
        with self.passes.whole(params) if self.tied.has_copies else contextlib.nullcontext():
            self.tied.broadcast()
            self.p2p.channels.flush()  # gathered weights are freed afterwards

    # -- one action ------------------------------------------------------------------------------

    def _receive_input(self, action: Action, feed: _MicroBatches) -> Any:
        """Wait for the input of an action: the stage's input, or the gradient of its output."""
        stage, micro = action.stage, action.micro
        if action.kind is ActionKind.FORWARD:
            return feed.inputs(micro) if stage == 0 else self.p2p.receive_activation(stage, micro)
        is_end = stage == self.module.num_stages - 1
        return self.p2p.receive_gradient(stage, micro) if action.kind.makes_gradient and not is_end else None

    def _forward(self, action: Action, inputs: Any, feed: _MicroBatches) -> list[Tensor]:
        """Run a stage and keep what its backward needs; returns the loss on the last stage."""
        stage, micro = action.stage, action.micro
        kept = _InFlight(inputs, None)
        output = self.passes.forward(self.module, stage, inputs, self._around(kept))
        is_end = stage == self.module.num_stages - 1
        kept.output = self._loss(output, feed.labels(micro)) if is_end else output
        self.in_flight[stage, micro] = kept
        if is_end:
            return [kept.output.detach()]
        self.p2p.send_activation(stage + 1, micro, output)
        return []

    def _around(self, kept: _InFlight) -> Around:
        return functools.partial(DeferWeightGrads, kept.deferred) if self.splits_backward else contextlib.nullcontext

    def _loss(self, output: Any, labels: Any) -> Tensor:
        loss_fn = self.module.loss_fn
        loss = output if loss_fn is None else self.passes.loss(loss_fn, output, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = "loss_fn" if self.module.loss_fn is not None else "the last layer (there is no loss_fn)"
            raise ValueError(f"{what} returned {type(loss).__name__}; a pipeline needs a scalar loss")
        return loss

    def _backward(self, action: Action, gradients: Any, micro_batches: int) -> None:
        stage, micro = action.stage, action.micro
        kept = self.in_flight[stage, micro]
        if action.kind.makes_gradient:
            if stage == self.module.num_stages - 1:
                root = self.passes.share(kept.output.reshape(()), micro_batches)
                pairs = [(root, torch.ones_like(root))]
            else:
                pairs = _outputs_with_grad(kept.output, gradients)
            back = kept.deferred.backward if self.splits_backward else torch.autograd.backward
            back([part for part, _ in pairs], [gradient for _, gradient in pairs])
            kept.output = None
            if stage:
                self.p2p.send_gradient(stage - 1, micro, kept.inputs)
        if action.kind.frees_activations:
            kept.deferred.finish()
            del self.in_flight[stage, micro]


@final
@attrs.define(eq=False)
class _MicroBatches:
    """Reads micro-batches on demand, each once, and drops those that this rank no longer needs."""

    batches: Batches
    module: PipelineModule
    read: dict[int, tuple[Any, Any]] = attrs.field(factory=dict)
    count: int = 0

    def inputs(self, micro: int) -> Any:
        """Input of the first stage."""
        return self._get(micro, keeps=self.module.num_stages - 1 in self.module.my_stages)[0]

    def labels(self, micro: int) -> Any:
        """Labels for the last stage."""
        return self._get(micro, keeps=False)[1]

    def _get(self, micro: int, *, keeps: bool) -> tuple[Any, Any]:
        while self.count <= micro:
            try:
                self.read[self.count] = next(self.batches)
            except StopIteration:
                raise ValueError(
                    f"the data ended after {self.count} micro-batches, in the middle of a batch. Pass an iterator "
                    "that does not end (RepeatingLoader), or whole batches"
                ) from None
            self.count += 1
        return self.read[micro] if keeps else self.read.pop(micro)


def _outputs_with_grad(output: Any, gradients: Any) -> list[tuple[Tensor, Any]]:
    """Return the outputs of a stage that require gradients, with their gradients."""
    pairs = zip(_tensors(output), _tensors(gradients))
    return [(part, gradient) for part, gradient in pairs if part is not None and part.requires_grad]


def _tensors(message: Any) -> tuple[Tensor | None, ...]:
    return message if isinstance(message, tuple) else (message,)
