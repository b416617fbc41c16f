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

from contextlib import ExitStack
from typing import TYPE_CHECKING, final

import attrs
from torch import Tensor

from zengine import _compat
from zengine.clock import CallOrderError, Phase
from zengine.losses import check_loss, check_reached

if TYPE_CHECKING:
    from zengine.clock import MicroStep
    from zengine.engine import Engine


class EngineTorchStyle:
    """`scale`, and what `step` does about a backward that it was not told of; mixed into `Engine`."""

    def scale(self: Engine, loss: Tensor) -> Tensor:  # type: ignore[misc]
        """The loss for a backward of your own, `engine.scale(loss).backward()`: divided by the micro-steps, and
        multiplied by the loss scale.

        loss: the mean over this rank's micro-batch.  Of what is returned exactly one backward is legal.  Terms may be
        added to `loss`, not to the result.

        Raises:
            CallOrderError: no forward came before.
            ValueError: the loss is not a scalar, or has no graph.
        """
        self.clock.require_forward("scale")
        check_loss(loss)
        micro = self.clock.micro_step()
        for feature in self._features:
            loss = feature.backward_begin(micro, loss)
        share = self._losses.share(loss, micro, None, divides=True)
        scaled = self.parts.scaler.scale(share)
        if scaled is loss:
            scaled = loss.view_as(loss)  # a tensor of our own: the hook shall not hang on the caller's
        begin = _Begin(self, share.detach())
        scaled.register_hook(begin)  # type: ignore[no-untyped-call]
        return scaled

    def take_plain_gradients(self: Engine) -> None:  # type: ignore[misc]
        """Take what `loss.backward()` has left in `.grad` for a micro-step, if that is what it would have been.

        Raises:
            CallOrderError: there are gradients, and something is missing from them.
        """
        self.clock.settle()
        has_gradients = self.parts.partition.has_plain_gradients
        if self.clock.phase not in (Phase.IDLE, Phase.FORWARD) or (
            self.clock.phase is Phase.IDLE and not has_gradients()
        ):
            return
        accumulation, scale = self.clock.accumulation, self.loss_scale
        missing = [f"the division by gradient_accumulation_steps = {accumulation}"] * (accumulation != 1)
        missing += [f"the loss scale, {scale:g} now"] * (scale != 1)
        if not has_gradients() and (missing or self.parts.partition.is_alone):
            return  # `step` was called too early
        if missing:
            raise CallOrderError(
                f"step() {self.clock.position} found gradients of a plain loss.backward(), which miss "
                f"{' and '.join(missing)}: call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._losses.meet(None, self.clock.micro_step())
        self.clock.accept_backward()
        self._losses.forget()


@final
@attrs.define(eq=False)
class _Begin:
    """The hook that opens the phase, once."""

    engine: Engine
    share: Tensor  # what is differentiated, detached, without the loss scale

    def __call__(self, grad: Tensor) -> None:
        running = self.engine.clock.pending
        if isinstance(running, OpenBackward) and running.is_running:
            running.share = running.share + self.share  # two losses were added and go back together
            return
        self.engine.clock.settle()
        backward = OpenBackward(self.engine, self.share)
        backward.open()
        _compat.at_end_of_backward(backward.close)  # where torch cannot, the engine's next call closes it


@final
@attrs.define(eq=False)
class OpenBackward:
    """A backward that the caller runs, from its first hook to its end; the clock's `pending` one meanwhile."""

    engine: Engine
    share: Tensor
    task: int = attrs.field(factory=_compat.backward_number)  # of autograd, while it runs; 0: torch does not tell
    phases: ExitStack = attrs.field(factory=ExitStack)
    micro: MicroStep | None = None

    @property
    def is_running(self) -> bool:
        """Whether this thread is inside it."""
        return self.task != 0 and _compat.backward_number() == self.task

    def open(self) -> None:
        """Begin the phase."""
        engine, parts = self.engine, self.engine.parts
        with ExitStack() as phases:
            micro = phases.enter_context(engine.clock.backward())
            phases.enter_context(parts.telemetry.span("backward"))
            phases.enter_context(engine.reducing(micro))
            self.phases, self.micro = phases.pop_all(), micro
        engine.clock.pending = self

    def close(self) -> None:
        """The backward has ended well."""
        engine, micro = self.engine, self.micro
        if engine.clock.pending is not self:
            return
        engine.clock.pending = None
        assert micro is not None
        with self.phases:
            check_reached(engine.parts.partition)
        engine._losses.add(self.share)
        for feature in engine._features:
            feature.backward_end(micro)

    def settle(self) -> None:
        """Another call of the engine: the backward is over, so without a callback it has failed."""
        if self.is_running:
            return  # a hook of the caller's calls the engine from within the backward
        if not _compat.TELLS_END:
            self.close()
            return
        self.engine.clock.pending = None
        error = RuntimeError("the backward of engine.scale(loss) failed")
        self.phases.__exit__(RuntimeError, error, None)
