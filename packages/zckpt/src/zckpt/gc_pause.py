"""Postponing Python's cyclic garbage collector.

Problem.  A checkpoint of tens of thousands of tensors makes a few objects for each.  They trigger full collections,
and each visits every object of the program, the model's modules as well: two thirds of the time of such a save.

Design.  The verbs that a program waits for (`save`, `load`, `find`, `Checkpoint.read`) postpone the collector; almost
everything they make is freed by its reference count when they return.  Background threads do not, as they would
postpone it for the training.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the collector inside, unless it is disabled already."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
