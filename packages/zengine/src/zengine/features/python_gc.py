"""Python's cyclic garbage collector, off while the engine lives ("disable_python_gc").

A full collection walks every object of the process, tens of milliseconds in a large program, and on many ranks each
has its pause at another moment, for which all others wait.  Reference counts free what a step makes; what is left
are cycles, which `engine.collect_python_gc()` frees when the caller has time: after an evaluation or a checkpoint,
on all ranks.

The collector is one for the whole process, so engines count: it comes back when the last one that wanted it off is
closed, or dropped without that.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from zengine.features.base import Feature

if TYPE_CHECKING:
    from zengine.engine import Engine


class PythonGC(Feature):
    """Switches the collector off; on again with the last engine."""

    _holders: ClassVar[set[object]] = set()  # a token of each engine that is open

    def __init__(self) -> None:
        self._let_go: Callable[[], object] = lambda: None

    def attach(self, engine: Engine) -> None:
        """From now on nothing is collected by itself.  A collector that the caller switched off stays off."""
        if gc.isenabled() or self._holders:
            token = object()
            self._holders.add(token)
            gc.disable()
            self._let_go = weakref.finalize(self, _let_go, self._holders, token)

    def close(self) -> None:
        """The last one switches it on again."""
        self._let_go()


def _let_go(holders: set[object], token: object) -> None:
    holders.discard(token)
    if not holders:
        gc.enable()
