"""Report of one optimizer boundary.

`step()` of other engines returns nothing, so a skipped step is found days later in a log, if at all.  Here every
boundary returns a report with the same fields at every ZeRO stage and dtype: truthy if the update was applied,
otherwise with the reason.
"""

from __future__ import annotations

from typing import NoReturn

import attrs

UNKNOWN_RANK = -1


@attrs.frozen(kw_only=True)
class NonFiniteGradient:
    """The first gradient that was infinite or NaN."""

    parameter: str  # its name in the module
    kind: str  # "nan" or "inf"
    rank: int = UNKNOWN_RANK  # where it arose; UNKNOWN_RANK: only the sum over ranks was checked


@attrs.frozen(kw_only=True)
class StepReport:
    """One optimizer boundary; `bool(report)` is True if the weights changed."""

    applied: bool
    reason: str  # "" when applied, else the problem, its place and the consequence
    step: int  # boundaries so far, this one included; advances on a skipped step too
    applied_steps: int  # boundaries that changed the weights
    skipped_steps: int  # boundaries that did not; step == applied_steps + skipped_steps
    samples: int  # samples of all ranks so far: the x axis of every chart
    loss: (
        float  # mean over the micro-steps and ranks of this step; NaN if the caller ran a backward without the engine
    )
    grad_norm: float  # global L2 norm of the averaged gradients, unscaled, before clipping
    loss_scale: float  # the factor this step's loss was multiplied by (1 without scaling)
    lr: tuple[float, ...]  # learning rate of each parameter group in this step
    nonfinite: NonFiniteGradient | None = None  # if the step was skipped for its gradients

    def __bool__(self) -> bool:
        return self.applied

    @property
    def culprit(self) -> NoReturn:
        """Raise AttributeError: the old name of `nonfinite`."""
        raise AttributeError("StepReport.culprit was renamed in 0.3.0; use StepReport.nonfinite.")

    def __str__(self) -> str:
        """Format the report as one line."""
        counts = f"step {self.step} ({self.applied_steps} applied, {self.skipped_steps} skipped)"
        if not self.applied:
            return f"{counts}: {self.reason}"
        rates = ", ".join(f"{rate:g}" for rate in self.lr)
        scale = f", loss scale {self.loss_scale:g}" * (self.loss_scale != 1)
        return f"{counts}: loss {self.loss:.6g}, gradient norm {self.grad_norm:.4g}, lr {rates}{scale}"
