"""`bench_steps`: a run that knows when enough has been measured.

After the warm-up and so many steps rank 0 prints a summary (sinks/bench.py) and `engine.bench_done` is True on every
rank.  Training goes on: whether to stop is the loop's to decide, and one that never asks trains as if nothing had
been said.  Rejected: an exception out of `step()`, which loses the run of whoever left the key in the config; and
`sys.exit`, which leaves the other ranks where they are.
"""

from __future__ import annotations

from typing import final

import attrs


@final
@attrs.define(eq=False)
class Countdown:
    """Boundaries until the figures are complete; counted on every rank, so that all agree."""

    steps: int  # boundaries in all, warm-up included; 0 means never
    seen: int = 0  # boundaries since the start or a reset

    def step_end(self) -> None:
        self.seen += 1

    def reset(self) -> None:
        """Begin again, with the warm-up."""
        self.seen = 0

    @property
    def is_over(self) -> bool:
        return 0 < self.steps <= self.seen


def make_countdown(bench_steps: int, warmup_steps: int) -> Countdown:
    """Of a plan's `bench_steps` (0: never) behind its warm-up."""
    return Countdown(bench_steps + warmup_steps if bench_steps else 0)
