"""Backward in torch's style: `engine.scale(loss).backward()`, or `loss.backward()` if that is equivalent.

`engine.backward(loss)` is a phase with a beginning and an end, which a caller's own backward does not announce.  So
`scale` registers a hook on the loss that it returns; autograd calls it first, and it opens the phase.  An autograd
callback at the end of that backward closes it.  If the backward fails, autograd calls no callback: the engine's next
call then finds the phase open and drops the gradients of the step, as an exception in `engine.backward` does.

Without `scale` the gradients are in `.grad` of the parameters, as in plain torch (a GAN's generator, which trains
through its discriminator, needs that).  `step` uses them if the engine would have computed the same, and otherwise
raises an error that names the missing factors.  A rank knows only its own gradients: in a group of ranks, one without
gradients takes part with zeros, as after an `engine.backward` whose loss reaches no parameter; if no rank has any,
all ranks find that at the boundary.

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
from zengine.engine.clock import CallOrderError, MicroStep, Phase
from zengine.engine.feature import Feature
from zengine.engine.loss_weighting import check_loss, check_reached
from zengine.engine.parts import Run


def scale(run: Run, features: Sequence[Feature], loss: Tensor) -> Tensor:
    """Return the loss for the caller's own backward; see `Engine.scale`."""
    run.clock.require_forward("scale")
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
    """Count gradients of a plain `loss.backward()` as a micro-step, if the engine would have computed the same.

    Raises:
        CallOrderError: the gradients lack a division or the loss scale.
    """
    clock, parts = run.clock, run.parts
    clock.finish_pending()
    has_gradients = parts.partition.has_plain_gradients
    if clock.phase not in (Phase.IDLE, Phase.FORWARD) or (clock.phase is Phase.IDLE and not has_gradients()):
        return
    accumulation, factor = clock.accumulation, float(parts.scaler.factor)
    missing = [f"the division by gradient_accumulation_steps = {accumulation}"] * (accumulation != 1)
    missing += [f"the loss scale, {factor:g} now"] * (factor != 1)
    if not has_gradients() and (missing or parts.partition.is_alone):
        return  # `step` was called too early
    if missing:
        raise CallOrderError(
            f"step() {clock.position} found gradients of a plain loss.backward(), which lack "
            f"{' and '.join(missing)}: call engine.backward(loss), or engine.scale(loss).backward()"
        )
    run.losses.agree_on_unit(None, clock.micro_step())
    clock.accept_backward()
    run.losses.mark_unknown()


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
