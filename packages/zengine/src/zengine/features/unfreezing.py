"""Parameters that are unfrozen between two steps are trained from the next forward pass on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from zengine.features.base import Feature

if TYPE_CHECKING:
    from zengine.engine import Engine
    from zpartition import Partition


@final
class Unfreezing(Feature):
    """Looks before each forward pass whether a parameter that was frozen requires a gradient now."""

    partition: Partition

    def attach(self, engine: Engine) -> None:
        self.partition = engine.parts.partition

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.is_grad_enabled():
            self.partition.admit_unfrozen()
        return args, kwargs
