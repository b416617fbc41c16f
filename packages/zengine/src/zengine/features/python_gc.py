"""Python's cyclic garbage collector, off while the engine lives ("disable_python_gc").

A full collection walks every object of the process, tens of milliseconds in a large program, and on many ranks each
has its pause at another moment, for which all others wait.  Reference counts free what a step makes; what is left
are cycles, which `engine.collect_python_gc()` frees when the caller has time: after an evaluation or a checkpoint,
on all ranks.

The collector is one for the whole process, so engines count: it comes back when the last one that wanted it off is
closed.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, ClassVar

from zengine.features.base import Feature

if TYPE_CHECKING:
    from zengine.engine import Engine


class PythonGC(Feature):
    """Switches the collector off; on again with the last engine."""

    _holders: ClassVar[weakref.WeakSet[PythonGC]] = weakref.WeakSet()  # features of engines that are open

    def attach(self, engine: Engine) -> None:
        """From now on nothing is collected by itself.  A collector that the caller switched off stays off."""
        if gc.isenabled() or self._holders:
            self._holders.add(self)
            gc.disable()

    def close(self) -> None:
        """The last one switches it on again."""
        if self in self._holders:
            self._holders.discard(self)
            if not self._holders:
                gc.enable()
