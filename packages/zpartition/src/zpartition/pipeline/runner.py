"""Carrying out a schedule: one batch of micro-batches through the stages of this rank.

The runner knows no schedule by name and no optimizer.  It leaves gradients where backward leaves them, so that plain
torch optimizers work as they do without a pipeline.  Who partitions the weights, scales losses or measures says how
one forward and one backward are carried out (`Passes`): a ZeRO stage has a round around each backward, of which only
the last of a batch sends anything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .actions import Action, Kind
from .alarm import Alarm
from .deferral import LaterProducts, WeightsLater
from .module import Around, PipelineModule
from .post import Post
from .schedule import Schedule
from .schedules import make_schedule
from .ties import TiedWeights

Observe = Callable[[Action, float, float], None]
Batches = Iterator[tuple[Any, Any]]  # (input of the first layer, labels), one for each micro-batch


class Passes:
    """How the rank's part of a batch is carried out: the identity, to be overridden."""

    def forward(self, module: PipelineModule, stage: int, value: Any, around: Around) -> Any:
        """The output of one stage."""
        return module(value, stage, around)

    def loss(self, loss_fn: Callable[[Any, Any], Any], output: Any, labels: Any) -> Any:
        """What `loss_fn` says."""
        return loss_fn(output, labels)

    def share(self, loss: Tensor, micro_batches: int) -> Tensor:
        """What is differentiated of a micro-batch's loss, () or (1,), so that all together are their mean."""
        return loss / micro_batches

    def backward(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around each backward of this rank; `is_last` of the batch."""
        return contextlib.nullcontext()

    def whole(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """Around reading weights outside of a module."""
        return contextlib.nullcontext()


@final
@attrs.define(eq=False)
class _Kept:
    """What one micro-batch leaves at one stage between its forward and its backward."""

    inputs: Any
    output: Any  # at the last stage the loss
    later: LaterProducts = attrs.field(factory=LaterProducts)


@final
@attrs.define(eq=False)
class PipelineRunner:
    """The rank's side of `module`'s pipeline."""

    module: PipelineModule
    schedule_name: str
    post: Post
    tied: TiedWeights
    passes: Passes
    alarm: Alarm = attrs.field(default=attrs.Factory(lambda self: Alarm(self.module), takes_self=True))
    halves: bool = False  # backward comes in two: weights' gradients wait for their own action
    kept: dict[tuple[int, int], _Kept] = attrs.field(factory=dict)

    @classmethod
    def over(
        cls,
        module: PipelineModule,
        schedule: str = "1f1b",
        group: ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        passes: Passes | None = None,
    ) -> PipelineRunner:
        """A runner of the named schedule; see `make_schedule`.  ScheduleError if it does not fit the stages.

        group: the ranks of the pipeline, first stage first; None: those that `module` names.
        """
        per_rank = module.num_stages // module.place.num_ranks
        name = "interleaved" if schedule == "1f1b" and per_rank > 1 else schedule
        make_schedule(name, module.place.num_ranks, module.place.num_ranks, per_rank)
        own = module.stage_cell().group if group is None else group
        post = Post.of(module, own, torch.device(device))
        return cls(module, name, post, TiedWeights(module, post.wires), passes or Passes())

    def schedule(self, micro_batches: int) -> Schedule:
        """The schedule of a batch of so many micro-batches."""
        ranks = self.module.place.num_ranks
        return make_schedule(self.schedule_name, ranks, micro_batches, self.module.num_stages // ranks)

    def train_batch(
        self, batches: Batches, micro_batches: int, observe: Observe = lambda action, start, stop: None
    ) -> Tensor:
        """Forward and backward of a whole batch; returns the mean loss, detached, on every rank of the pipeline.

        batches: read on the ranks that hold the first and the last stage, alike, as they are needed.
        observe: told of each action, when it had what it needed and when it was over, by time.perf_counter.
        Gradients are those of the mean over micro-batches.  () float64.
        """
        with self._batch("the beginning of a batch"):
            losses = self._train(batches, micro_batches, observe)
            self.post.end()
            return self.share(losses, micro_batches).sum()

    def _train(self, batches: Batches, micro_batches: int, observe: Observe) -> list[Tensor]:
        """Carry out the schedule; losses of the last stage, each divided, and none elsewhere."""
        schedule = self.schedule(micro_batches)
        actions = schedule.ranks[self.module.place.rank]
        self.halves = any(action.kind is Kind.WEIGHT for rank in schedule.ranks for action in rank)
        feed, losses = _Feed(batches, self.module), list[Tensor]()
        last = len(actions) - 1 if not self.tied.collects else -1  # every rank's list ends with a backward
        self._lend()
        self.post.begin(schedule)
        for number, action in enumerate(actions):
            self.alarm.go_on(action)
            needed = self._needed(action, feed)
            start = time.perf_counter()
            if action.kind is Kind.FORWARD:
                losses += [loss / micro_batches for loss in self._forward(action, needed, feed)]
            else:
                with self.passes.backward(is_last=number == last):
                    self._backward(action, needed, micro_batches)
            observe(action, start, time.perf_counter())
        self.alarm.doing = "the end of a batch"
        with self.passes.backward(is_last=True) if self.tied.collects else contextlib.nullcontext():
            self.tied.collect()
        return losses

    def eval_batch(self, batches: Batches, micro_batches: int, compute_loss: bool = True) -> Any:
        """Forward alone: the mean loss on every rank; or the outputs of the last layer, a list on its rank."""
        with self._batch("the beginning of an evaluation"):
            found = self.evaluate(batches, micro_batches, compute_loss=compute_loss, keep_outputs=not compute_loss)
            if compute_loss:
                return self.share([loss for _, loss in found], micro_batches).mean()
            return [output for output, _ in found]

    @torch.no_grad()
    def evaluate(
        self, batches: Batches, micro_batches: int, *, compute_loss: bool = True, keep_outputs: bool = True
    ) -> list[tuple[Any, Any]]:
        """Forward alone: on the last stage's rank (output, loss) of each micro-batch; [] on the others.

        What is not asked for is None, and not kept.
        """
        names = [Action(stage, Kind.FORWARD, m) for m in range(micro_batches) for stage in self.module.my_stages]
        feed, found = _Feed(batches, self.module), list[tuple[Any, Any]]()
        with self._batch("the beginning of an evaluation"):
            self._lend()
            self.post.begin_forward(micro_batches)
            for action in sorted(names, key=lambda each: (each.micro, each.stage)):
                self.alarm.go_on(action)
                needed = self._needed(action, feed)
                output = self.passes.forward(self.module, action.stage, needed, contextlib.nullcontext)
                if action.stage == self.module.num_stages - 1:
                    labels = feed.labels(action.micro)  # read in any case: the ranks' data stay alike
                    loss = self._loss(output, labels) if compute_loss else None
                    found.append((output if keep_outputs else None, loss))
                else:
                    self.post.give_value(action.stage + 1, action.micro, output)
            self.alarm.doing = "the end of an evaluation"
            self.post.end()
        return found

    @contextlib.contextmanager
    def _batch(self, call: str) -> Iterator[None]:
        """Around a batch: what fails here is told, and leaves nothing behind."""
        try:
            with self.alarm.guarding(call):
                yield
        except BaseException:
            self.kept.clear()
            self.post.abandon()
            raise

    def share(self, losses: list[Tensor], micro_batches: int) -> Tensor:
        """The last stage's losses, told to all ranks of the pipeline: (micro_batches,) float64."""
        told = torch.zeros(micro_batches, dtype=torch.float64, device=self.post.wires.device)
        for micro, loss in enumerate(losses):
            told[micro] = loss.detach().reshape(())
        if self.module.place.num_ranks > 1:
            source = (self.module.num_stages - 1) % self.module.place.num_ranks
            self.post.wires.broadcast(told, source)
        return told

    def _lend(self) -> None:
        params = [param for module in self.module.owned.values() for param in module.parameters()]
        with self.passes.whole(params) if self.tied.collects else contextlib.nullcontext():
            self.tied.lend()
            self.post.wires.flush()  # what was gathered is gone afterwards

    # -- one action ------------------------------------------------------------------------------

    def _needed(self, action: Action, feed: _Feed) -> Any:
        """What an action works on, once it is here: a stage's input, or the gradient of its output."""
        stage, micro = action.stage, action.micro
        if action.kind is Kind.FORWARD:
            return feed.inputs(micro) if stage == 0 else self.post.take_value(stage, micro)
        is_end = stage == self.module.num_stages - 1
        return self.post.take_gradient(stage, micro) if action.kind.makes_gradient and not is_end else None

    def _forward(self, action: Action, inputs: Any, feed: _Feed) -> list[Tensor]:
        """Run a stage, and keep what its backward needs; the loss if it is the last."""
        stage, micro = action.stage, action.micro
        kept = _Kept(inputs, None)
        output = self.passes.forward(self.module, stage, inputs, self._around(kept))
        is_end = stage == self.module.num_stages - 1
        kept.output = self._loss(output, feed.labels(micro)) if is_end else output
        self.kept[stage, micro] = kept
        if is_end:
            return [kept.output.detach()]
        self.post.give_value(stage + 1, micro, output)
        return []

    def _around(self, kept: _Kept) -> Around:
        return partial(WeightsLater, kept.later) if self.halves else contextlib.nullcontext

    def _loss(self, output: Any, labels: Any) -> Tensor:
        loss_fn = self.module.loss_fn
        loss = output if loss_fn is None else self.passes.loss(loss_fn, output, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = "loss_fn" if self.module.loss_fn is not None else "the last layer (there is no loss_fn)"
            raise ValueError(f"{what} returned {type(loss).__name__}; a pipeline trains on a scalar loss")
        return loss

    def _backward(self, action: Action, gradients: Any, micro_batches: int) -> None:
        stage, micro = action.stage, action.micro
        kept = self.kept[stage, micro]
        if action.kind.makes_gradient:
            if stage == self.module.num_stages - 1:
                root = self.passes.share(kept.output.reshape(()), micro_batches)
                pairs = [(root, torch.ones_like(root))]
            else:
                pairs = _wanted(kept.output, gradients)
            back = kept.later.backward if self.halves else torch.autograd.backward
            back([part for part, _ in pairs], [gradient for _, gradient in pairs])
            kept.output = None
            if stage:
                self.post.give_gradient(stage - 1, micro, kept.inputs)
        if action.kind.frees_activations:
            kept.later.finish()
            del self.kept[stage, micro]


@final
@attrs.define(eq=False)
class _Feed:
    """Micro-batches as they are asked for, each read once and let go when nobody here asks for it again."""

    batches: Batches
    module: PipelineModule
    read: dict[int, tuple[Any, Any]] = attrs.field(factory=dict)
    count: int = 0

    def inputs(self, micro: int) -> Any:
        """For the first stage."""
        return self._get(micro, keeps=self.module.num_stages - 1 in self.module.my_stages)[0]

    def labels(self, micro: int) -> Any:
        """For the last one."""
        return self._get(micro, keeps=False)[1]

    def _get(self, micro: int, *, keeps: bool) -> tuple[Any, Any]:
        while self.count <= micro:
            try:
                self.read[self.count] = next(self.batches)
            except StopIteration:
                raise ValueError(
                    f"the data ended after {self.count} micro-batches of a batch; a batch takes more. Give an "
                    "iterator that goes on (RepeatingLoader), or whole batches"
                ) from None
            self.count += 1
        return self.read[micro] if keeps else self.read.pop(micro)


def _wanted(output: Any, gradients: Any) -> list[tuple[Tensor, Any]]:
    """What backward begins with of what a stage has handed on."""
    pairs = zip(_tensors(output), _tensors(gradients))
    return [(part, gradient) for part, gradient in pairs if part is not None and part.requires_grad]


def _tensors(message: Any) -> tuple[Tensor | None, ...]:
    return message if isinstance(message, tuple) else (message,)
