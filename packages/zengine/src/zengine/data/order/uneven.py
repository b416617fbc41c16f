"""Uneven steps: shares of one batch for any number of ranks.

An elastic job keeps its batch at every world, also where the batch does not divide by the ranks.  Every rank then
runs equally many micro-steps, because ranks meet in each of them, with samples that differ in number:

    micro-step i of A takes the samples  floor(i B / A) ... floor((i + 1) B / A) - 1  of the step's batch of B,
    rank r of R takes of these n samples   floor(r n / R) ... floor((r + 1) n / R) - 1.

So a step takes exactly the next B samples of the epoch's order, as at any other world, numbers differ by one at most,
and a run may change its world between two steps.  The mean over the batch weighs a rank's mean over its n(i, r)
samples by n(i, r) R / B, where ranks are averaged.

A rank without samples in a micro-step (more ranks than samples) runs one sample of it with the weight 0.

Rejected: ranks with different numbers of micro-steps, whose messages would not match (stages 2 and 3); a batch that
is rounded to the ranks, which changes the learning rate that fits it.
"""

from __future__ import annotations

from typing import final

import attrs

__all__ = ["UnevenStep"]


@final
@attrs.frozen(kw_only=True)
class UnevenStep:
    """Shares of a step's batch."""

    batch: int  # samples of a step, over all ranks
    accumulation: int  # micro-steps of a step
    world_size: int  # ranks that share the data

    @classmethod
    def within(cls, batch: int, world_size: int, most: int) -> UnevenStep:
        """Return the step with the fewest micro-steps of at most `most` samples a rank."""
        return cls(batch=batch, accumulation=-(-batch // (world_size * most)), world_size=world_size)

    @property
    def most(self) -> int:
        """Samples of a rank in a micro-step, at most."""
        return -(-self.batch // (self.accumulation * self.world_size))

    def micro_step(self, index: int) -> range:
        """Return the samples of a micro-step, as places in the step's batch."""
        return range(index * self.batch // self.accumulation, (index + 1) * self.batch // self.accumulation)

    def share(self, index: int, rank: int) -> range:
        """Return the samples of `rank` in a micro-step; empty if there are fewer samples than ranks."""
        whole = self.micro_step(index)
        first, end = (whole.start + len(whole) * at // self.world_size for at in (rank, rank + 1))
        return range(first, end)

    def factors(self, rank: int) -> tuple[float, ...]:
        """Return the weight of this rank's mean in each micro-step, where ranks are averaged; 1/A in an even step."""
        return tuple(
            len(self.share(index, rank)) * self.world_size / self.batch for index in range(self.accumulation)
        )
