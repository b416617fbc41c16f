"""What zoptim raises when the caller, not zoptim, made the mistake.

Every class is also a ValueError or TypeError, so code that catches those keeps working.  Each
message says what was given, what is allowed and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnknownNameError(ValueError):
    """An optimizer, schedule or option name that nobody here answers to."""


class NotAvailableYetError(ValueError):
    """A name that DeepSpeed knows and zoptim does not have yet."""


class UnsupportedTensorError(TypeError):
    """A parameter or gradient that an elementwise update cannot take (sparse, complex)."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """' Did you mean 'x'?' for the nearest allowed name, or '' when none is near."""
    by_folded = {name.lower(): name for name in sorted(allowed)}
    near = difflib.get_close_matches(str(given).lower(), by_folded, n=1, cutoff=0.6)
    return f" Did you mean {by_folded[near[0]]!r}?" if near else ""


def refuse_unknown_options(owner: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise UnknownNameError for the first option of `owner` that is not allowed."""
    allowed = list(allowed)
    for name in given:
        if name not in allowed:
            raise UnknownNameError(
                f"{owner} has no option {name!r}.{did_you_mean(name, allowed)} "
                f"It takes: {', '.join(allowed) if allowed else 'no options'}."
            )
