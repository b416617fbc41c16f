"""Backward in torch's style: `engine.scale(loss).backward()`, or `loss.backward()` without a loss scale.

`engine.backward(loss)` is a phase with a beginning and an end, which a caller's own backward does not announce.  So
`scale` registers a hook on the loss that it returns; autograd calls it first, and it opens the phase.  An autograd
callback at the end of that backward closes it.  If the backward fails, autograd calls no callback: the engine's next
call then finds the phase open and drops the gradients of the step, as an exception in `engine.backward` does.

Without `scale` the gradients are in `.grad` of the parameters, as in plain torch (a GAN's generator, which trains
through its discriminator, needs that).  `step` divides them by the accumulation count and reduces them: one
micro-step.  A loss scale must be there before backward, so `step` raises if it is missing.  A rank knows only its own
gradients: in a group of ranks, one without gradients takes part with zeros, as after an `engine.backward` whose loss
reaches no parameter; if no rank has any, all ranks find that at the boundary.

Rejected: hooks on the outputs of the module to recognize the engine's backward.  A generator that trains through its
discriminator's engine would count as a step of the discriminator.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import final

import attrs
from torch import Tensor

from zengine import _compat
from zengine.engine.clock import CallOrderError, MicroStep, Phase, Sync
from zengine.engine.feature import Feature
from zengine.engine.loss_weighting import check_loss, check_reached
from zengine.engine.parts import Run


def scale(run: Run, features: Sequence[Feature], loss: Tensor) -> Tensor:
    """Return the loss for the caller's own backward; see `Engine.scale`."""
    run.clock.require_open("scale")
    check_loss(loss)
    micro = run.clock.micro_step()
    for feature in features:
        loss = feature.backward_begin(micro, loss)
    share = run.losses.share(loss, micro, None, divides=True)
    scaled = run.parts.scaler.scale(share)
    if scaled is loss:
        scaled = loss.view_as(loss)  # our own tensor: the hook must not be on the caller's
    begin = _Begin(run, features, share.detach())
    scaled.register_hook(begin)  # type: ignore[no-untyped-call]
    return scaled


def accept_plain_gradients(run: Run) -> None:
    """Reduce the gradients of plain `loss.backward()` calls since the last step as those of one micro-step.

    Raises:
        CallOrderError: they lack the loss scale, were added to gradients of the engine, or are to stay on this rank
            (`no_sync`).
        ValueError: earlier losses of the step had weights.
    """
    clock, parts = run.clock, run.parts
    clock.finish_pending()
    has_gradients = parts.partition.has_plain_gradients
    if clock.phase not in (Phase.IDLE, Phase.FORWARD) or (clock.phase is Phase.IDLE and not has_gradients()):
        return
    factor = float(parts.scaler.factor)
    if not has_gradients() and (factor != 1 or parts.partition.is_alone):
        if parts.partition.num_plain_backwards():
            raise CallOrderError(
                f"step() {clock.position}: a plain loss.backward() added to gradients of an engine.backward() of the "
                "same step. Use one of them in all micro-steps of a step; engine.restart_step() begins it again"
            )
        return  # `step` was called too early
    if factor != 1:
        raise CallOrderError(
            f"step() {clock.position} found gradients of a plain loss.backward(), which lack the loss scale, "
            f"{factor:g} now: call engine.backward(loss), or engine.scale(loss).backward()"
        )
    if clock.sync is Sync.LOCAL:
        raise CallOrderError(
            f"step() {clock.position} found gradients of a plain loss.backward() inside no_sync(), where they would "
            "be reduced: call engine.backward(loss) there, or step() outside"
        )
    if run.plan.batch.uneven:
        raise CallOrderError(
            f"step() {clock.position} found gradients of a plain loss.backward(), which lack the weight of this "
            "rank's share of an uneven batch: call engine.backward(loss), or engine.scale(loss).backward()"
        )
    with clock.backward() as micro:
        run.losses.agree_on_unit(None, micro)
        run.losses.mark_unknown(micro)
        parts.partition.adopt_plain_gradients(micro.count, is_last=micro.is_last)


def check_unmixed(run: Run, micro: MicroStep) -> None:
    """Check that a backward of the engine does not add to plain gradients without its factors.

    Raises:
        CallOrderError: a plain `loss.backward()` in the same micro-step lacks a division or the loss scale.
    """
    partition = run.parts.partition
    if partition.num_plain_backwards() == 0:
        return
    factor = float(run.parts.scaler.factor)
    missing = [f"the division by gradient_accumulation_steps = {micro.count}"] * (micro.count != 1)
    missing += [f"the loss scale, {factor:g} now"] * (factor != 1)
    if missing and partition.has_plain_gradients():
        raise CallOrderError(
            f"backward() {run.clock.position} would add to gradients of a plain loss.backward(), which lack "
            f"{' and '.join(missing)}: call engine.backward for both losses, or drop the plain gradients with "
            "optimizer.zero_grad()"
        )


@final
@attrs.define(eq=False)
class _Begin:
    """Hook on the scaled loss that opens the phase, once."""

    run: Run
    features: Sequence[Feature]
    share: Tensor  # the differentiated loss, detached, without the loss scale

    def __call__(self, grad: Tensor) -> None:
        running = self.run.clock.pending
        if isinstance(running, OpenBackward) and running.is_running:
            running.share = running.share + self.share  # two scaled losses were added: one backward for both
            return
        self.run.clock.finish_pending()
        backward = OpenBackward(self.run, self.features, self.share)
        backward.open()
        _compat.at_end_of_backward(backward.close)  # if torch cannot, the engine's next call closes it


@final
@attrs.define(eq=False)
class OpenBackward:
    """Backward that the caller runs, from its first hook to its end; the clock's `pending` one meanwhile."""

    run: Run
    features: Sequence[Feature]
    share: Tensor
    task: int = attrs.field(factory=_compat.backward_number)  # of autograd, while it runs; 0: unknown
    phases: ExitStack = attrs.field(factory=ExitStack)
    micro: MicroStep | None = None

    @property
    def is_running(self) -> bool:
        """Return True if this thread is inside it."""
        return self.task != 0 and _compat.backward_number() == self.task

    def open(self) -> None:
        """Begin the phase."""
        run = self.run
        with ExitStack() as phases:
            micro = phases.enter_context(run.clock.backward())
            phases.enter_context(run.parts.telemetry.span("backward"))
            phases.enter_context(run.reducing(micro))
            check_unmixed(run, micro)
            self.phases, self.micro = phases.pop_all(), micro
        run.clock.pending = self

    def close(self) -> None:
        """End the phase after a successful backward."""
        run, micro = self.run, self.micro
        if run.clock.pending is not self:
            return
        run.clock.pending = None
        assert micro is not None
        with self.phases:
            check_reached(run.parts.partition)
        run.losses.add(self.share)
        for feature in self.features:
            feature.backward_end(micro)

    def finish(self) -> None:
        """End the phase at the engine's next call: without a callback before, the backward has failed."""
        if self.is_running:
            return  # a caller's hook calls the engine inside the backward
        if not _compat.TELLS_END:
            self.close()
            return
        self.run.clock.pending = None
        error = RuntimeError("the backward of engine.scale(loss) failed")
        self.phases.__exit__(RuntimeError, error, None)
