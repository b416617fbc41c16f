"""What one optimizer boundary did, as a value that explains itself.

`step()` of other engines returns nothing, so a skipped step is found days later in a log, if at all.
Here every boundary yields a report: truthy when the update was applied, with the reason when it was not,
and with the same fields for every ZeRO stage and dtype.
"""

from __future__ import annotations

import attrs

UNKNOWN_RANK = -1


@attrs.frozen(kw_only=True)
class NonFiniteGradient:
    """The first gradient that was infinite or NaN."""

    parameter: str  # its name in the module
    kind: str  # "nan" or "inf"
    rank: int = UNKNOWN_RANK  # where it arose; UNKNOWN_RANK: in the sum over ranks, or nobody has looked


@attrs.frozen(kw_only=True)
class StepReport:
    """One optimizer boundary; `bool(report)` says whether weights changed."""

    applied: bool
    reason: str  # "" when applied, else what went wrong, where, and what was done about it
    step: int  # boundaries so far, this one included; advances on a skipped step too
    applied_steps: int  # boundaries that changed the weights
    skipped_steps: int  # boundaries that did not; step == applied_steps + skipped_steps
    samples: int  # samples seen by all ranks so far: the x axis of every chart
    loss: float  # mean over the micro-steps and ranks of this step; NaN if backwards ran without the engine
    grad_norm: float  # global L2 norm of the averaged gradients, unscaled, before clipping
    loss_scale: float  # the factor this step's loss was multiplied by (1 without scaling)
    lr: tuple[float, ...]  # learning rate of each parameter group in this step
    nonfinite: NonFiniteGradient | None = None  # of a step that was skipped for its gradients

    def __bool__(self) -> bool:
        return self.applied

    def __str__(self) -> str:
        """One line for people."""
        counts = f"step {self.step} ({self.applied_steps} applied, {self.skipped_steps} skipped)"
        if not self.applied:
            return f"{counts}: {self.reason}"
        rates = ", ".join(f"{rate:g}" for rate in self.lr)
        scale = f", loss scale {self.loss_scale:g}" * (self.loss_scale != 1)
        return f"{counts}: loss {self.loss:.6g}, gradient norm {self.grad_norm:.4g}, lr {rates}{scale}"
