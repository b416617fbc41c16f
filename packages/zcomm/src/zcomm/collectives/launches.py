"""Launches: listeners that are told of each collective before it is issued.

    remove = zcomm.on_launch(listener)    # listener(op, group)

Problem.  NCCL wants the collectives of all groups that ranks share in one order.  Code that may issue a collective at
several moments (gradients beside a backward) must choose one that all ranks agree on: a place among the other
collectives, which other code issues.

Design.  `start` calls the listeners first, so that what a listener issues itself comes before.  Code that launches
through torch's own functions says so with `launching`.  Listeners are process-wide, as traces are: autograd issues
collectives on its own threads.  A listener that is a method is held weakly and ends with its object.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable

from torch.distributed import ProcessGroup

__all__ = ["launching", "on_launch"]

Listener = Callable[[str, ProcessGroup | None], None]

_lock = threading.Lock()  # guards changes of _listeners
_listeners: tuple[Callable[[], Listener | None], ...] = ()  # replaced, never mutated: a reader needs no lock


def on_launch(listener: Listener) -> Callable[[], None]:
    """Call `listener(op, group)` before each collective of more than one rank; returns a function that ends it.

    It is called by the thread that issues the collective.  A method is held weakly.
    """
    reference: Callable[[], Listener | None] = (
        weakref.WeakMethod(listener) if inspect.ismethod(listener) else lambda: listener
    )

    def remove() -> None:
        global _listeners
        with _lock:
            _listeners = tuple(each for each in _listeners if each is not reference)

    global _listeners
    with _lock:
        _listeners = (*(each for each in _listeners if each() is not None), reference)
    return remove


def launching(op: str, group: ProcessGroup | None = None) -> None:
    """Tell the listeners that a launch over `group` follows; zcomm's own collectives do so themselves.

    op: name of the operation: "send", "all_to_all", ...
    """
    for reference in _listeners:
        listener = reference()
        if listener is not None:
            listener(op, group)
