"""Routers that balance their experts by a bias learn, once a step, how many tokens each expert was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from torch.distributed import ProcessGroup

from zengine.features.base import Feature
from zengine.lazily import is_imported

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
        self.routers, self.group = (), engine.parts.groups.gradient()
        if is_imported("zpartition.experts"):
            from zpartition.experts import balanced_routers

            self.routers = balanced_routers(engine.module)

    def step_end(self, report: StepReport) -> None:
        if self.routers:
            from zpartition.experts import balance

            balance(self.routers, self.group)
