"""Checked values of JSON files that any program may have written: the expected type, or ValueError."""

from __future__ import annotations

__all__ = ["read_amount", "read_count", "read_text"]

_LIMIT = 2**63  # exclusive upper bound of counts and amounts


def read_text(value: object) -> str:
    """Return `value` if it is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is no text")
    return value


def read_count(value: object) -> int:
    """Return `value` if it is an integer >= 0."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LIMIT:
        raise ValueError(f"{value!r:.80} is no count")
    return value


def read_amount(value: object) -> float:
    """Return `value` as a float if it is a finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LIMIT:
        raise ValueError(f"{value!r:.80} is no amount")
    return float(value)
