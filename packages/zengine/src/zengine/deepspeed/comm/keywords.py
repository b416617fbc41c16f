"""Keywords of the collectives that nobody here needs, and those that are misspelt.

DeepSpeed's logger adds `prof`, `log_name` and `debug` to every collective.  Programs pass them, so they are taken
and dropped.  To drop whatever comes would drop `asynch_op=True` as well, and the caller would go on as if he had a
handle.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")

LOGGING = frozenset({"prof", "log_name", "debug"})


def takes_logging(verb: Callable[..., R]) -> Callable[..., R]:
    """`verb`, which may be called with the arguments of DeepSpeed's logger as well.

    A keyword that neither knows is a TypeError with the nearest one.
    """
    own = frozenset(inspect.signature(verb).parameters)

    @functools.wraps(verb)
    def called(*args: Any, **options: Any) -> R:
        if not own.issuperset(options):
            options = {name: value for name, value in options.items() if name in own or _is_known(name, verb, own)}
        return verb(*args, **options)

    return called


def _is_known(name: str, verb: Callable[..., Any], own: frozenset[str]) -> bool:
    """False for an argument of the logger, which is to be dropped; TypeError for others."""
    if name in LOGGING:
        return False
    from zengine.config.grammar.suggest import nearest

    close = nearest(name, own)
    hint = f"did you mean {close[0]}=?" if close else f"it takes {', '.join(sorted(own))}."
    raise TypeError(f"{verb.__name__}() got an unknown keyword {name}=: {hint}")
