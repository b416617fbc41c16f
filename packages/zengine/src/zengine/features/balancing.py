"""Routers that balance their experts by a bias learn, once a step, how many tokens each expert was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from torch.distributed import ProcessGroup

from zengine.features.base import Feature
from zpartition.experts import balance, balanced_routers

if TYPE_CHECKING:
    from zengine.engine import Engine
    from zengine.report import StepReport
    from zpartition.experts import Router


@final
class Balancing(Feature):
    """Moves the biases after each step; a module without such routers has no message more."""

    routers: Sequence[Router]
    group: ProcessGroup | None

    def attach(self, engine: Engine) -> None:
        self.routers, self.group = balanced_routers(engine.module), engine.parts.groups.gradient()

    def step_end(self, report: StepReport) -> None:
        balance(self.routers, self.group)
