"""Carrying out a schedule: one batch of micro-batches through the stages of this rank.

The runner knows no schedule by name and no optimizer.  It leaves gradients where backward leaves them, so that plain
torch optimizers and every ZeRO stage work as they do without a pipeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .actions import Action, Kind
from .deferral import LaterProducts, WeightsLater
from .module import Around, PipelineModule
from .post import Post
from .schedule import Schedule
from .schedules import make_schedule
from .ties import TiedWeights

Batches = Iterator[tuple[Any, Any]]  # (input of the first layer, labels), one for each micro-batch


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
    """The rank's side of `module`'s pipeline over `group` (None: the world)."""

    module: PipelineModule
    schedule_name: str
    post: Post
    tied: TiedWeights
    halves: bool = False  # backward comes in two: weights' gradients wait for their own action
    kept: dict[tuple[int, int], _Kept] = attrs.field(factory=dict)

    @classmethod
    def over(
        cls,
        module: PipelineModule,
        schedule: str = "1f1b",
        group: ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> PipelineRunner:
        """A runner of the named schedule; see `make_schedule`.  ScheduleError if it does not fit the stages."""
        per_rank = module.num_stages // module.place.num_ranks
        name = "interleaved" if schedule == "1f1b" and per_rank > 1 else schedule
        make_schedule(name, module.place.num_ranks, module.place.num_ranks, per_rank)
        post = Post.of(module, group, torch.device(device))
        return cls(module, name, post, TiedWeights(module, post.wires))

    def schedule(self, micro_batches: int) -> Schedule:
        """The schedule of a batch of so many micro-batches."""
        ranks = self.module.place.num_ranks
        return make_schedule(self.schedule_name, ranks, micro_batches, self.module.num_stages // ranks)

    def train_batch(
        self,
        batches: Batches,
        micro_batches: int,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
        observe: Callable[[Action], None] = lambda action: None,
    ) -> Tensor:
        """Forward and backward of a whole batch; returns the mean loss, detached, on every rank of the pipeline.

        batches: read on the ranks that hold the first and the last stage, alike.
        scale: of a micro-batch's share of the loss, before its backward (a loss scale).
        observe: called after each action, for timelines.
        Gradients are those of the mean over micro-batches.
        """
        schedule = self.schedule(micro_batches)
        self.halves = any(action.kind is Kind.WEIGHT for actions in schedule.ranks for action in actions)
        feed = _Feed(batches, self.module)
        losses: list[Tensor] = []
        self.tied.lend()
        self.post.begin(schedule)
        try:
            for action in schedule.ranks[self.module.place.rank]:
                if action.kind is Kind.FORWARD:
                    loss = self._forward(action, feed, keep=True)
                    losses += [] if loss is None else [loss]
                else:
                    self._backward(action, lambda loss: scale(loss / micro_batches))
                observe(action)
        except BaseException:
            self.kept.clear()
            self.post.abandon()
            raise
        self.tied.collect()
        self.post.end()
        return self.share(losses, micro_batches)

    @torch.no_grad()
    def eval_batch(self, batches: Batches, micro_batches: int, compute_loss: bool = True) -> Any:
        """Forward alone: the mean loss on every rank; or the outputs of the last layer, a list on its rank."""
        names = [Action(stage, Kind.FORWARD, m) for m in range(micro_batches) for stage in self.module.my_stages]
        feed, found = _Feed(batches, self.module), list[Any]()
        self.tied.lend()
        self.post.begin_forward(micro_batches)
        for action in sorted(names, key=lambda each: (each.micro, each.stage)):
            result = self._forward(action, feed, keep=False, compute_loss=compute_loss)
            found += [] if result is None else [result]
        self.post.end()
        return self.share(found, micro_batches) if compute_loss else found

    def share(self, losses: list[Tensor], micro_batches: int) -> Tensor:
        """The last stage's mean loss, told to all ranks of the pipeline."""
        device, place = self.post.wires.device, self.module.place
        mean = torch.zeros((), dtype=torch.float64, device=device)
        for loss in losses:
            mean += loss.detach().double() / micro_batches
        if place.num_ranks > 1:
            source = (self.module.num_stages - 1) % place.num_ranks
            dist.broadcast(mean, group=self.post.wires.group, group_src=source)
        return mean

    # -- one action ------------------------------------------------------------------------------

    def _forward(self, action: Action, feed: _Feed, *, keep: bool, compute_loss: bool = True) -> Any:
        """Run a stage; the loss (or output) if it is the last."""
        stage, micro = action.stage, action.micro
        inputs = feed.inputs(micro) if stage == 0 else self.post.take_value(stage, micro)
        kept = _Kept(inputs, None)
        output = self.module.run(stage, inputs, self._around(kept) if keep else contextlib.nullcontext)
        if stage == self.module.num_stages - 1:
            output = self._loss(output, feed.labels(micro)) if compute_loss else output
        if keep:
            kept.output = output
            self.kept[stage, micro] = kept
        if stage == self.module.num_stages - 1:
            return output.detach() if compute_loss else output
        self.post.give_value(stage + 1, micro, output)
        return None

    def _around(self, kept: _Kept) -> Around:
        return partial(WeightsLater, kept.later) if self.halves else contextlib.nullcontext

    def _loss(self, output: Any, labels: Any) -> Tensor:
        loss = output if self.module.loss_fn is None else self.module.loss_fn(output, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = "loss_fn" if self.module.loss_fn is not None else "the last layer (there is no loss_fn)"
            raise ValueError(f"{what} returned {type(loss).__name__}; a pipeline trains on a scalar loss")
        return loss

    def _backward(self, action: Action, scale: Callable[[Tensor], Tensor]) -> None:
        stage, micro = action.stage, action.micro
        kept = self.kept[stage, micro]
        if action.kind.makes_gradient:
            if stage == self.module.num_stages - 1:
                torch.autograd.backward(scale(kept.output.reshape(())))
            else:
                pairs = [
                    (part, gradient)
                    for part, gradient in zip(_tensors(kept.output), _tensors(self.post.take_gradient(stage, micro)))
                    if part is not None and part.requires_grad
                ]
                torch.autograd.backward([part for part, _ in pairs], [gradient for _, gradient in pairs])
            kept.output = None
            if stage:
                self.post.give_gradient(stage - 1, micro, kept.inputs)
        if action.kind.frees_activations:
            kept.later.finish()
            del self.kept[stage, micro]


@final
@attrs.define(eq=False)
class _Feed:
    """Micro-batches as they are asked for, each read once; only first and last stages ask."""

    batches: Batches
    module: PipelineModule
    read: dict[int, tuple[Any, Any]] = attrs.field(factory=dict)
    count: int = 0

    def inputs(self, micro: int) -> Any:
        return self._get(micro)[0]

    def labels(self, micro: int) -> Any:
        return self._get(micro)[1]

    def _get(self, micro: int) -> tuple[Any, Any]:
        while self.count <= micro:
            try:
                self.read[self.count] = next(self.batches)
            except StopIteration:
                raise ValueError(
                    f"the data ended after {self.count} micro-batches of a batch; a batch takes more. Give an "
                    "iterator that goes on (RepeatingLoader), or whole batches"
                ) from None
            self.count += 1
        return self.read[micro]


def _tensors(message: Any) -> tuple[Tensor | None, ...]:
    return message if isinstance(message, tuple) else (message,)
