"""Gradients looked at before they are summed over ranks: whose NaN it was.

After the sum a NaN of one rank is a NaN of all.  To know the rank somebody must look before, which reads every
gradient once more and waits for the device; so it is off until somebody who has seen a NaN turns it on, and off
again some healthy steps later.
"""

from __future__ import annotations

from typing import final

import attrs
import torch

from zpartition.gradient import BucketGradient

STEPS = 100  # that are looked at before a NaN counts as a single one


@final
@attrs.define(eq=False)
class Lookout:
    """Remembers the first parameter of this rank whose gradient was infinite or NaN."""

    steps_left: int = 0  # for how many steps it looks
    sighted: str = ""  # its name; "" = none so far in this step

    def begin(self) -> None:
        """Look from the next step on."""
        self.steps_left = STEPS + 1  # the one that is under way counts

    def step_over(self) -> None:
        """A step has ended, or begins again."""
        self.sighted, self.steps_left = "", max(0, self.steps_left - 1)

    def look(self, gradient: BucketGradient) -> None:
        """At the sealed local buffer of a bucket, if that is on; waits for the device."""
        if not self.steps_left or self.sighted or gradient.local is None:
            return
        if bool(torch.isfinite(gradient.local[: gradient.bucket.numel]).all()):
            return
        for slot, view in zip(gradient.bucket.slots, gradient.views_of(gradient.local)):
            if not bool(torch.isfinite(view).all()):
                self.sighted = slot.name
                return
