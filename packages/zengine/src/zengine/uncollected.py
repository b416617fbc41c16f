"""Imports without Python's garbage collector.

Importing makes many objects that stay, so the collector runs dozens of times, walks all of torch each time and
finds nothing: a fifth of the time that our imports take.  What was made meanwhile then counts as old, as it would
after as many collections: freezing and unfreezing moves it there without looking at it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, the collector rests; afterwards it is as it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else somebody wants some objects to stay frozen
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()
