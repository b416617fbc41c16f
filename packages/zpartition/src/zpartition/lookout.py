"""Gradients looked at before they are summed over ranks: whose NaN it was.

After the sum a NaN of one rank is a NaN of all.  To know the rank somebody must look before, which reads every
gradient once more; so it is off until somebody who has seen a NaN turns it on.
"""

from __future__ import annotations

from typing import final

import attrs
import torch

from zpartition.gradient import BucketGradient


@final
@attrs.define(eq=False)
class Lookout:
    """Remembers the first parameter of this rank whose gradient was infinite or NaN."""

    is_on: bool = False
    sighted: str = ""  # its name; "" = none so far in this step

    def look(self, gradient: BucketGradient) -> None:
        """At the sealed local buffer of a bucket, if that is on; waits for the device."""
        if not self.is_on or self.sighted or gradient.local is None:
            return
        if bool(torch.isfinite(gradient.local[: gradient.bucket.numel]).all()):
            return
        for slot, view in zip(gradient.bucket.slots, gradient.views_of(gradient.local)):
            if not bool(torch.isfinite(view).all()):
                self.sighted = slot.name
                return
