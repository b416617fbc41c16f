"""Logging keywords of DeepSpeed's collectives: accepted and ignored; any other unknown keyword raises.

DeepSpeed's logger adds `prof`, `log_name` and `debug` to every collective, and programs pass them.  Rejected:
ignoring every unknown keyword, since a misspelt `asynch_op=True` would be ignored too, and the caller would continue
without a handle.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")

LOGGING = frozenset({"prof", "log_name", "debug"})


def accept_logging_keywords(verb: Callable[..., R]) -> Callable[..., R]:
    """Return `verb` with the keywords of DeepSpeed's logger accepted too.

    Another unknown keyword raises TypeError with the nearest known one.
    """
    own = frozenset(inspect.signature(verb).parameters)

    @functools.wraps(verb)
    def called(*args: Any, **options: Any) -> R:
        if not own.issuperset(options):
            options = {name: value for name, value in options.items() if name in own or _is_known(name, verb, own)}
        return verb(*args, **options)

    return called


def _is_known(name: str, verb: Callable[..., Any], own: frozenset[str]) -> bool:
    """Return False for a logging keyword.  Raises TypeError for any other."""
    if name in LOGGING:
        return False
    from zengine.config.grammar.suggest import nearest

    close = nearest(name, own)
    hint = f"did you mean {close[0]}=?" if close else f"it takes {', '.join(sorted(own))}."
    raise TypeError(f"{verb.__name__}() got an unknown keyword {name}=: {hint}")
