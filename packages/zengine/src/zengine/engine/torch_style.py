"""Backward in torch's way: `engine.scale(loss).backward()`, or `loss.backward()` where that means the same.

`engine.backward(loss)` is a phase with a beginning and an end.  A caller who runs the backward himself tells
neither, so `scale` hangs a hook on the loss it returns, which autograd calls before anything else: there the phase
begins, and it ends in a callback of autograd's at the end of that backward.  If the backward fails, no callback
comes: then the engine's next call finds the phase open and drops the gradients of the step, as an exception in
`engine.backward` does.

Without `scale` the engine knows nothing: the gradients lie in `.grad` of the parameters, as in plain torch (that is
what a GAN's generator needs, which trains through its discriminator).  `step` takes them if they are what it would
have computed itself, and otherwise says what is missing.  Whether there are any is known to this rank alone: where
there are others, one without gradients takes part with zeros, as it does if the loss of an `engine.backward` reaches
nothing there; that nobody has any is found at the boundary, by all.

Rejected: hooks on the outputs of the module, by which another engine guesses that a backward is its own; a generator
that trains through its discriminator's engine would be taken for a step of the discriminator.
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
        scaled = loss.view_as(loss)  # a tensor of our own: the hook must not hang on the caller's
    begin = _Begin(run, features, share.detach())
    scaled.register_hook(begin)  # type: ignore[no-untyped-call]
    return scaled


def accept_plain_gradients(run: Run) -> None:
    """Accept what `loss.backward()` left in `.grad` as a micro-step, if the engine would have computed the same.

    Raises:
        CallOrderError: there are gradients, and a division or the loss scale is missing from them.
    """
    clock, parts = run.clock, run.parts
    clock.settle()
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
            f"step() {clock.position} found gradients of a plain loss.backward(), which miss "
            f"{' and '.join(missing)}: call engine.backward(loss), or engine.scale(loss).backward()"
        )
    run.losses.meet(None, clock.micro_step())
    clock.accept_backward()
    run.losses.forget()


@final
@attrs.define(eq=False)
class _Begin:
    """Hook on the scaled loss that opens the phase, once."""

    run: Run
    features: Sequence[Feature]
    share: Tensor  # what is differentiated, detached, without the loss scale

    def __call__(self, grad: Tensor) -> None:
        running = self.run.clock.pending
        if isinstance(running, OpenBackward) and running.is_running:
            running.share = running.share + self.share  # two losses were added and go back together
            return
        self.run.clock.settle()
        backward = OpenBackward(self.run, self.features, self.share)
        backward.open()
        _compat.at_end_of_backward(backward.close)  # where torch cannot, the engine's next call closes it


@final
@attrs.define(eq=False)
class OpenBackward:
    """A backward that the caller runs, from its first hook to its end; the clock's `pending` one meanwhile."""

    run: Run
    features: Sequence[Feature]
    share: Tensor
    task: int = attrs.field(factory=_compat.backward_number)  # of autograd, while it runs; 0: torch does not tell
    phases: ExitStack = attrs.field(factory=ExitStack)
    micro: MicroStep | None = None

    @property
    def is_running(self) -> bool:
        """Return whether this thread is inside it."""
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
        """The backward has ended well."""
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

    def settle(self) -> None:
        """Another call of the engine: the backward is over, so without a callback it has failed."""
        if self.is_running:
            return  # a hook of the caller's calls the engine from within the backward
        if not _compat.TELLS_END:
            self.close()
            return
        self.run.clock.pending = None
        error = RuntimeError("the backward of engine.scale(loss) failed")
        self.phases.__exit__(RuntimeError, error, None)
