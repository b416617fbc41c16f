"""A save that failed behind the loop's back is told at the next boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from zengine.features.base import Feature

if TYPE_CHECKING:
    from zengine.engine import Engine
    from zengine.saving import Saver


@final
class BackgroundSaves(Feature):
    """Asks the saver at each boundary, before anything is updated."""

    saver: Saver

    def attach(self, engine: Engine) -> None:
        self.saver = engine.parts.saver

    def step_begin(self) -> None:
        self.saver.check()
