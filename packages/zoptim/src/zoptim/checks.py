"""Checks of values that users give: numbers, whole numbers and flags, with the argument's name in the message.

A negative learning rate or an `"1e-3"` that YAML read as text fails at construction; in the update it would be a
wrong curve or an error from a kernel.
"""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any

__all__ = ["flag", "integer", "number", "optional_flag"]


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a float if it is a finite number in [low, high); else TypeError or ValueError."""
    allowed = _interval(low, high)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a number in {allowed}.")
    exact: Any = value  # an int may be beyond every float
    if not max(low, -sys.float_info.max) <= exact <= sys.float_info.max or not exact < high:  # NaN neither
        raise ValueError(f"{name} is {value!r}; it must be a number in {allowed}.")
    return float(value)


def integer(name: str, value: Any, low: int = 0) -> int:
    """`value` as an int if it is whole (1000.0, as JSON writes 1e3, counts) and >= low."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a whole number >= {low}.")
    exact: Any = value
    if exact % 1 != 0 or exact < low:  # NaN and infinity too
        raise ValueError(f"{name} is {value!r}; it must be a whole number >= {low}.")
    return int(exact)


def flag(name: str, value: Any) -> bool:
    """`value` if it is True or False; else TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be True or False.")
    return value


def optional_flag(name: str, value: Any) -> bool | None:
    """`value` if it is True, False or None (None: zoptim chooses)."""
    return None if value is None else flag(name, value)


def _interval(low: float, high: float) -> str:
    left = "(-inf" if low == -math.inf else f"[{low:g}"
    return f"{left}, {high:g})"
