"""Checks of arguments: numbers, whole numbers, flags, option names.  Messages name the argument.

A negative learning rate, or a "1e-3" that YAML read as text, raises at construction instead of bending the curve or
failing inside a kernel.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable
from typing import Any

from zoptim.errors import UnknownNameError, did_you_mean

__all__ = ["check_option_names", "flag", "integer", "number", "optional_flag"]


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Return `value` as a float.  Raises TypeError or ValueError unless it is a finite number in [low, high)."""
    allowed = _interval(low, high)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a number in {allowed}.")
    exact: Any = value  # an int may be beyond every float
    if not max(low, -sys.float_info.max) <= exact <= sys.float_info.max or not exact < high:  # NaN neither
        raise ValueError(f"{name} is {value!r}; it must be a number in {allowed}.")
    return float(value)


def integer(name: str, value: Any, low: int = 0) -> int:
    """Return `value` as an int; 1000.0, as JSON reads 1e3, is whole.

    Raises TypeError or ValueError unless it is a whole number >= low.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a whole number >= {low}.")
    exact: Any = value
    if exact % 1 != 0 or exact < low:  # NaN and infinity too
        raise ValueError(f"{name} is {value!r}; it must be a whole number >= {low}.")
    return int(exact)


def flag(name: str, value: Any) -> bool:
    """Return `value`.  Raises TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be True or False.")
    return value


def optional_flag(name: str, value: Any) -> bool | None:
    """Return `value`.  Raises TypeError unless it is True, False or None (zoptim chooses)."""
    return None if value is None else flag(name, value)


def check_option_names(owner: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise UnknownNameError for the first of `given` that is not an option of `owner`."""
    allowed = list(allowed)
    for name in given:
        if name not in allowed:
            raise UnknownNameError(
                f"{owner} has no option {name!r}.{did_you_mean(name, allowed)} "
                f"It takes: {', '.join(allowed) if allowed else 'no options'}."
            )


def _interval(low: float, high: float) -> str:
    left = "(-inf" if low == -math.inf else f"[{low:g}"
    return f"{left}, {high:g})"
