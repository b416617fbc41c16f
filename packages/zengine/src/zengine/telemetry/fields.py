"""Values out of files that anybody may have written: of the type that is expected, or a ValueError."""

from __future__ import annotations

__all__ = ["amount", "text", "whole"]

MOST = 2**63  # of a count: beyond it nothing was counted


def text(value: object) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is no text")
    return value


def whole(value: object) -> int:
    """A count: a whole number from 0."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST:
        raise ValueError(f"{value!r:.80} is no count")
    return value


def amount(value: object) -> float:
    """A finite number from 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < MOST:
        raise ValueError(f"{value!r:.80} is no amount")
    return float(value)
