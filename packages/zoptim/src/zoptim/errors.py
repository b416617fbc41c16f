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
    """' Did you mean 'x'?' for the nearest allowed names, or '' when none is near.

    Names at one slip of the pen come first: the ratio of difflib does not see that "ly" was to be "lr".
    """
    by_folded = {name.lower(): name for name in sorted(allowed)}
    typed = str(given).lower()
    near = [name for name in by_folded if _is_one_slip(typed, name)][:3]
    near = near or difflib.get_close_matches(typed, by_folded, n=1, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(by_folded[name]) for name in near)}?" if near else ""


def _is_one_slip(typed: str, name: str) -> bool:
    """Return whether one letter was left out, added, changed, or swapped with its neighbour."""
    start = next((at for at, (a, b) in enumerate(zip(typed, name)) if a != b), min(len(typed), len(name)))
    typed, name = typed[start:], name[start:]
    swapped = typed[1:2] + typed[:1] + typed[2:]
    return name in (typed[1:], swapped) or typed[1:] == name[1:] or typed == name[1:]


def check_option_names(owner: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise UnknownNameError for the first option of `owner` that is not allowed."""
    allowed = list(allowed)
    for name in given:
        if name not in allowed:
            raise UnknownNameError(
                f"{owner} has no option {name!r}.{did_you_mean(name, allowed)} "
                f"It takes: {', '.join(allowed) if allowed else 'no options'}."
            )
