"""Trial load: check a state by loading it, for objects that cannot check it otherwise.

Our own parts check a state before anything changes.  A schedule of torch, or a caller's dataset or feature, can only
load it.  So it loads a copy, its previous state is restored, and the returned function loads the state again: what
succeeded once is expected to succeed again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Stateful", "trial_load"]


class Stateful(Protocol):
    """Object with a state dict."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> object: ...


def trial_load(
    holder: Stateful, state: Any, check: Callable[[], None] = lambda: None, restore: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Return a function that loads `state` into `holder`, which is unchanged when this returns.

    check: called after the trial.  restore: undoes side effects of a load outside of `holder`.

    Raises the errors of `holder` and `check`.
    """
    before, attributes = copy.deepcopy(holder.state_dict()), set(_attributes(holder))
    try:
        holder.load_state_dict(copy.deepcopy(state))
        check()
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
