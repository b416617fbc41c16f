"""What the rooms of the bench share: a contender is a name and a way to prepare its step on an arena."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from arena import Arena

__all__ = ["BETAS", "DECAY", "EPS", "LOSS_SCALE", "LR", "MAX_NORM", "MOMENTUM", "Contender", "Step", "Unavailable"]

Step = Callable[[], object]  # one optimizer step on memory that was laid out before

# One set of options for everybody: with decay, so that nobody skips a term.
LR, BETAS, EPS, DECAY, MOMENTUM = 1e-3, (0.9, 0.999), 1e-8, 0.01, 0.9
LOSS_SCALE, MAX_NORM = 4.0, 1.0  # of the whole boundary; the gradients' norm is above, so clipping acts


class Unavailable(Exception):
    """This contender cannot run here; the message says why.  The bench notes it and goes on."""


@attrs.frozen
class Contender:
    """A row of a table."""

    name: str
    prepare: Callable[[Arena], Step]  # raises Unavailable
    devices: tuple[str, ...] = ("cpu",)
