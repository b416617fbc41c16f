"""Contenders: a name, and a function that prepares the step on an arena."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from arena import Arena

__all__ = ["BETAS", "DECAY", "EPS", "LOSS_SCALE", "LR", "MAX_NORM", "MOMENTUM", "Contender", "Step", "Unavailable"]

Step = Callable[[], object]  # one optimizer step on prepared memory

# The options of all contenders: with decay, so that no term can be skipped.
LR, BETAS, EPS, DECAY, MOMENTUM = 1e-3, (0.9, 0.999), 1e-8, 0.01, 0.9
LOSS_SCALE, MAX_NORM = 4.0, 1.0  # of the whole boundary; the gradients' norm is above, so clipping acts


class Unavailable(Exception):
    """A contender that cannot run here; the message has the reason, which the report notes."""


@attrs.frozen
class Contender:
    """A row of a table."""

    name: str
    prepare: Callable[[Arena], Step]  # raises Unavailable
    devices: tuple[str, ...] = ("cpu",)
