"""Trying out a load on an object that can do nothing but load: a schedule of torch's, a caller's dataset or feature.

What is ours checks a state before anything changes.  The others say what they think of one by taking it.  So they
take it, what they had is put back, and what is returned lets them take it once more: what worked then works again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Stateful", "rehearsed"]


class Stateful(Protocol):
    """What can be tried out."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> object: ...


def rehearsed(
    holder: Stateful, state: Any, judge: Callable[[], None] = lambda: None, restore: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Return what loads `state` into `holder`, which is as before; raises what the holder, or `judge` after it, does.

    restore: puts back what lies outside of the holder, where a load reaches.
    """
    before, attributes = copy.deepcopy(holder.state_dict()), set(_attributes(holder))
    try:
        holder.load_state_dict(copy.deepcopy(state))
        judge()
    finally:
        holder.load_state_dict(before)
        for added in set(_attributes(holder)) - attributes:
            delattr(holder, added)
        restore()

    def commit() -> None:
        holder.load_state_dict(state)

    return commit


def _attributes(holder: Any) -> dict[str, Any]:
    return getattr(holder, "__dict__", {})
