"""Whether an update may be applied, decided from one inspection of the gradients.

The inspection is the same on all ranks, so is the verdict.  For every stage and dtype the rule is the same: an
update with an infinite or NaN gradient is left out, the weights and the optimizer's state stay as they are, and the
report names the parameter.  (Other engines check some dtypes at some stages and apply the NaN elsewhere.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, final

import attrs
import torch

import zcomm
import zprecision


class LossScaleExhausted(RuntimeError):
    """Gradients overflow although the loss scale is at its floor: scaling cannot help."""


@attrs.frozen
class Fault:
    """Why an update is left out; an empty reason (falsy) means that it is not."""

    reason: str = ""
    is_fatal: bool = False  # nothing the engine can do will make a later step succeed

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


NO_FAULT = Fault()


class Gradients(Protocol):
    """What a verdict may look at when something is wrong."""

    def named_gradients(self) -> Iterable[tuple[str, torch.Tensor]]:
        """(parameter name, this rank's part of its gradient)."""


class Judge(Protocol):
    """Decides about one update."""

    def __call__(self, is_finite: bool, gradients: Gradients) -> Fault: ...


def apply_always(is_finite: bool, gradients: Gradients) -> Fault:
    """bf16.check_grad_overflow = false: whatever comes is applied."""
    return NO_FAULT


@final
@attrs.frozen(eq=False)
class SkipNonFinite:
    """Leave out an update with infinite or NaN gradients."""

    scaler: zprecision.Scaler
    group: torch.distributed.ProcessGroup | None

    def __call__(self, is_finite: bool, gradients: Gradients) -> Fault:
        if is_finite:
            return NO_FAULT
        culprit = zprecision.first_nonfinite(gradients.named_gradients())
        mine = None if culprit is None else [culprit.name, culprit.kind]
        found = next((each for each in zcomm.exchange(mine, self.group) if each), ["some parameter", "not finite"])
        return Fault(f"gradient of {found[0]} is {found[1]}", is_fatal=bool(self.scaler.at_floor))
