"""Whether an update may be applied, decided from one inspection of the gradients.

The inspection is the same on all ranks, so is the verdict.  For every stage and dtype the rule is the same: an
update with an infinite or NaN gradient is left out, the weights and the optimizer's state stay as they are, and the
report names the parameter.  (Other engines check some dtypes at some stages and apply the NaN elsewhere.)

[Note: which rank]  What is inspected is the sum over ranks, where a NaN of one is a NaN of all.  The rank is known
if its own loss was not finite, as it is when data or weights are to blame.  Otherwise, where nothing is scaled (an
overflow of scaled gradients is nobody's fault), ranks look at their gradients before they send them for the
next hundred steps, so that another such step names the rank.  That reads gradients once more; to do it always would
cost every healthy run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, final

import attrs
import torch

import zcomm
import zprecision
from zengine.step_report import UNKNOWN_RANK, NonFiniteGradient


class LossScaleExhausted(RuntimeError):
    """Gradients overflow although the loss scale is at its floor: scaling cannot help."""


@attrs.frozen
class SkipReason:
    """Why an update is left out; an empty reason (falsy) means that it is not."""

    reason: str = ""
    is_fatal: bool = False  # nothing the engine can do will make a later step succeed
    nonfinite: NonFiniteGradient | None = None

    def __bool__(self) -> bool:
        return bool(self.reason)

    def raise_if_fatal(self, step: int) -> None:
        """Stop a run that would skip for ever."""
        if self.is_fatal:
            raise LossScaleExhausted(
                f"{self.reason} in step {step}, with the loss scale at its floor: the gradients themselves are not "
                "finite, or the floor is too high. Look at that parameter, lower the learning rate, set "
                "fp16.min_loss_scale lower, or train in bf16."
            )


NO_SKIP = SkipReason()


class NonFiniteProbe(Protocol):
    """Looks at this rank's gradients before they are sent."""

    def begin(self) -> None:
        """Look for some steps; costs a read of every gradient."""

    @property
    def first_name(self) -> str:
        """The first parameter whose gradient was not finite then; "" = none was seen."""


class Gradients(Protocol):
    """What a verdict may look at when something is wrong."""

    def named_gradients(self) -> Iterable[tuple[str, torch.Tensor]]:
        """(parameter name, this rank's part of its gradient)."""

    @property
    def non_finite_probe(self) -> NonFiniteProbe:
        """Tells of this rank's gradients before they were sent."""


class OverflowPolicy(Protocol):
    """Decides about one update; `is_own_loss_finite` says whether this rank's loss was a number."""

    def __call__(
        self, is_finite: bool, gradients: Gradients, is_own_loss_finite: Callable[[], bool]
    ) -> SkipReason: ...


def apply_always(is_finite: bool, gradients: Gradients, is_own_loss_finite: Callable[[], bool]) -> SkipReason:
    """bf16.check_grad_overflow = false: whatever comes is applied."""
    return NO_SKIP


@final
@attrs.frozen(eq=False)
class SkipNonFinite:
    """Leave out an update with infinite or NaN gradients."""

    scaler: zprecision.Scaler
    group: torch.distributed.ProcessGroup | None

    def __call__(self, is_finite: bool, gradients: Gradients, is_own_loss_finite: Callable[[], bool]) -> SkipReason:
        if is_finite:
            return NO_SKIP
        found = zprecision.first_nonfinite(gradients.named_gradients())
        here = _Sighting(
            summed=() if found is None else (found.name, found.kind),
            own=gradients.non_finite_probe.first_name,
            is_loss_finite=is_own_loss_finite(),
        )
        everywhere = [_Sighting(*seen) for seen in zcomm.all_gather_object(attrs.astuple(here), self.group)]
        if float(self.scaler.factor) == 1.0:
            gradients.non_finite_probe.begin()
        nonfinite = _blame(everywhere)
        where = f" on rank {nonfinite.rank}" * (len(everywhere) > 1 and nonfinite.rank != UNKNOWN_RANK)
        reason = f"gradient of {nonfinite.parameter} is {nonfinite.kind}{where}"
        return SkipReason(reason, bool(self.scaler.at_floor), nonfinite)


@attrs.frozen
class _Sighting:
    """What one rank has seen of a step that is not finite."""

    summed: tuple[str, str] | tuple[()] = ()  # (parameter, kind) in this rank's part of the sums
    own: str = ""  # parameter whose gradient was not finite before it was sent
    is_loss_finite: bool = True


def _blame(everywhere: list[_Sighting]) -> NonFiniteGradient:
    """One nonfinite from what all ranks have seen; see [Note: which rank]."""
    summed = next((seen.summed for seen in everywhere if seen.summed), ("some parameter", "not finite"))
    senders = [rank for rank, seen in enumerate(everywhere) if seen.own]
    losers = [rank for rank, seen in enumerate(everywhere) if not seen.is_loss_finite]
    ranks = senders or losers or ([0] if len(everywhere) == 1 else [UNKNOWN_RANK])
    return NonFiniteGradient(parameter=everywhere[ranks[0]].own or summed[0], kind=summed[1], rank=ranks[0])
