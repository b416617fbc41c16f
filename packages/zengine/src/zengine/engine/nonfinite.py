"""Overflow policy: whether an update is applied, decided from one inspection of the gradients.

The inspection is equal on all ranks, and so is the decision.  The rule is the same for every stage and dtype: an
update with an infinite or NaN gradient is skipped, weights and optimizer state stay unchanged, and the report names
the parameter; unless `bf16.check_grad_overflow` is false.  At the minimum loss scale LossScaleExhausted is raised.
(Other engines check only some dtypes at some stages, and apply the NaN elsewhere.)

[Note: which rank]  The inspected gradient is the sum over ranks, where a NaN of one rank is a NaN on all.  A rank
whose own loss is not finite is the cause; bad data or weights usually make it so.  Otherwise, without loss scaling
(an overflow of scaled gradients is no rank's fault), ranks check their gradients before sending them for the next
hundred steps, so that another such step names the rank.  The check reads gradients once more, which would slow down
every healthy run if it were always on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, final

import attrs
import torch

import zcomm
import zprecision
from zengine.pages import Page, explained
from zengine.step_report import UNKNOWN_RANK, NonFiniteGradient


@explained(Page.NOT_FINITE)
class LossScaleExhausted(RuntimeError):
    """Gradients overflow although the loss scale is at its floor: scaling cannot help."""


@attrs.frozen
class SkipReason:
    """Reason to skip an update; falsy if it is empty."""

    reason: str = ""
    is_fatal: bool = False  # no later step can succeed
    nonfinite: NonFiniteGradient | None = None

    def __bool__(self) -> bool:
        return bool(self.reason)

    def raise_if_fatal(self, step: int) -> None:
        """Raise LossScaleExhausted if every later step would be skipped too."""
        if self.is_fatal:
            raise LossScaleExhausted(
                f"{self.reason} in step {step}, with the loss scale at its floor: the gradients themselves are not "
                "finite, or the floor is too high. Check that parameter, lower the learning rate, set "
                "fp16.min_loss_scale lower, or train in bf16."
            )


NO_SKIP = SkipReason()


class NonFiniteProbe(Protocol):
    """Check of this rank's gradients before they are sent."""

    def begin(self) -> None:
        """Check the gradients of the next steps; costs a read of every gradient."""

    @property
    def first_name(self) -> str:
        """Name of the first parameter with a non-finite gradient; "" if none was found."""


class Gradients(Protocol):
    """Gradients as the policy reads them after a failed inspection."""

    def named_gradients(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield (parameter name, this rank's part of its gradient)."""

    @property
    def non_finite_probe(self) -> NonFiniteProbe:
        """Return the check of this rank's gradients before they are sent."""


class OverflowPolicy(Protocol):
    """Decides about one update; `is_own_loss_finite` returns True if this rank's loss was finite."""

    def __call__(
        self, is_finite: bool, gradients: Gradients, is_own_loss_finite: Callable[[], bool]
    ) -> SkipReason: ...


def apply_always(is_finite: bool, gradients: Gradients, is_own_loss_finite: Callable[[], bool]) -> SkipReason:
    """Apply every update (bf16.check_grad_overflow = false)."""
    return NO_SKIP


@final
@attrs.frozen(eq=False)
class SkipNonFinite:
    """Skips updates with infinite or NaN gradients."""

    scaler: zprecision.Scaler
    group: torch.distributed.ProcessGroup | None

    def __call__(self, is_finite: bool, gradients: Gradients, is_own_loss_finite: Callable[[], bool]) -> SkipReason:
        if is_finite:
            return NO_SKIP
        found = zprecision.first_nonfinite(gradients.named_gradients())
        here = _Finding(
            summed=() if found is None else (found.name, found.kind),
            own=gradients.non_finite_probe.first_name,
            is_loss_finite=is_own_loss_finite(),
        )
        everywhere = [_Finding(*seen) for seen in zcomm.all_gather_object(attrs.astuple(here), self.group)]
        if float(self.scaler.factor) == 1.0:
            gradients.non_finite_probe.begin()
        nonfinite = _locate(everywhere)
        where = f" on rank {nonfinite.rank}" * (len(everywhere) > 1 and nonfinite.rank != UNKNOWN_RANK)
        reason = f"gradient of {nonfinite.parameter} is {nonfinite.kind}{where}"
        return SkipReason(reason, bool(self.scaler.at_floor), nonfinite)


@attrs.frozen
class _Finding:
    """Findings of one rank in a non-finite step."""

    summed: tuple[str, str] | tuple[()] = ()  # (parameter, kind) in this rank's part of the sums
    own: str = ""  # parameter whose gradient was not finite before it was sent
    is_loss_finite: bool = True


def _locate(everywhere: list[_Finding]) -> NonFiniteGradient:
    """Return the gradient and its rank from the findings of all ranks; see [Note: which rank]."""
    summed = next((seen.summed for seen in everywhere if seen.summed), ("some parameter", "not finite"))
    senders = [rank for rank, seen in enumerate(everywhere) if seen.own]
    with_bad_loss = [rank for rank, seen in enumerate(everywhere) if not seen.is_loss_finite]
    ranks = senders or with_bad_loss or ([0] if len(everywhere) == 1 else [UNKNOWN_RANK])
    return NonFiniteGradient(parameter=everywhere[ranks[0]].own or summed[0], kind=summed[1], rank=ranks[0])
