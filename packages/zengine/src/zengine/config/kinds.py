"""What a value may be: strict types that say what they want.

`"false"` is not false, `"2"` is not 2 and `true` is not 1: each such conversion hides a mistake until the run
is over.  The two that lose nothing are made: a whole number where a fraction may stand, and `5e8` where a
whole number is wanted, because configs write bucket sizes so.

Every kind is idempotent: reading a value that was read gives the same value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from zengine.config.errors import shown


class Mismatch(Exception):
    """A value that is not of its kind: why, and perhaps what to write."""

    def __init__(self, reason: str, suggestion: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.suggestion = suggestion


@attrs.frozen
class Kind:
    """A set of values; `read` returns the value in its one canonical form or raises `Mismatch`."""

    wants: str  # "true or false", "a whole number >= 1"
    read: Callable[[Any], Any]


def json_type(value: object) -> str:
    """The name of a value's type in the words of JSON."""
    names = {bool: "true/false", int: "a number", float: "a number", str: "text", type(None): "null"}
    if isinstance(value, Mapping):
        return "an object {...}"
    if isinstance(value, (list, tuple)):
        return "a list [...]"
    return names.get(type(value), f"a Python {type(value).__name__}")


def _refuse(value: object, wants: str, suggestion: str = "") -> Mismatch:
    if value == "auto":
        return Mismatch(
            f'"auto" must be resolved by the integration that wrote it; this key needs {wants}',
            "Write the value, or leave the key out for its default.",
        )
    return Mismatch(f"needs {wants}, got {json_type(value)}", suggestion)


def _read_truth(value: object) -> bool:
    if isinstance(value, bool):
        return value
    lowered = str(value).lower()
    known = {"true": "true", "false": "false", "1": "true", "0": "false"}
    quotes = " without quotes" if isinstance(value, str) else ""
    hint = f"Write {known[lowered]}{quotes}." if lowered in known else ""
    raise _refuse(value, "true or false", hint)


TRUTH = Kind("true or false", _read_truth)


def _unquoted(value: object) -> str:
    """The hint for a number that was written as text."""
    try:
        float(str(value))
    except ValueError:
        return ""
    return f"Write {value} without quotes." if isinstance(value, str) else ""


def _in_range(value: float, low: float, high: float, above: float) -> None:
    if value < low:
        raise Mismatch(f"must be >= {low}")
    if value > high:
        raise Mismatch(f"must be <= {high}")
    if value <= above:
        raise Mismatch(f"must be > {above}")


def whole(low: float = 0, high: float = math.inf) -> Kind:
    """Whole numbers in [low, high]; 5e8 is one, true is not."""
    wants = "a whole number" + (f" >= {low}" if low > -math.inf else "")

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _refuse(value, wants, _unquoted(value))
        if not math.isfinite(value) or value != int(value):
            raise Mismatch(f"needs {wants}")
        _in_range(value, low, high, -math.inf)
        return int(value)

    return Kind(wants, read)


def number(low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> Kind:
    """Finite numbers in [low, high] and above `above`; whole ones become float."""
    wants = "a number"

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _refuse(value, wants, _unquoted(value))
        if not math.isfinite(value):
            raise Mismatch("must be finite")
        _in_range(value, low, high, above)
        return float(value)

    return Kind(wants, read)


def _read_text(value: object) -> str:
    if isinstance(value, str) and value != "auto":
        return value
    raise _refuse(value, "text")


TEXT = Kind("text", _read_text)


def choice(*names: str, fold: Callable[[str], str] = str) -> Kind:
    """One of some names; `fold` (`str.upper`, `str.lower`) makes the case of letters irrelevant."""
    wants = "one of " + ", ".join(f'"{name}"' for name in names)

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise _refuse(value, wants)
        name = fold(value)
        if name not in names:
            raise _refuse(value, wants) if value == "auto" else Mismatch(f"must be {wants}")
        return name

    return Kind(wants, read)


_DTYPES = {
    "float32": ("fp32", "float32", "float", "torch.float32"),
    "float64": ("fp64", "float64", "double", "torch.float64"),
    "float16": ("fp16", "float16", "half", "torch.float16"),
    "bfloat16": ("bf16", "bfloat16", "torch.bfloat16"),
}


def _read_dtype(value: object) -> str:
    for name, spellings in _DTYPES.items():
        if value in spellings:
            return name
    wants = 'one of "fp32", "fp16", "bf16", "fp64"'
    raise (_refuse(value, wants) if value == "auto" or not isinstance(value, str) else Mismatch(f"must be {wants}"))


DTYPE = Kind('one of "fp32", "fp16", "bf16", "fp64"', _read_dtype)


def _read_list(value: object) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise _refuse(value, "a list [...]")


LIST = Kind("a list [...]", _read_list)


def _read_mapping(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise _refuse(value, "an object {...}")


MAPPING = Kind("an object {...}", _read_mapping)
ANYTHING = Kind("any value", lambda value: value)


def literal(kind: Kind, *literals: object) -> Kind:
    """`kind`, or one of some values that stand for themselves: `literal(TRUTH, "auto")`."""
    wants = " or ".join([kind.wants.replace(" or ", ", "), *(shown(value) for value in literals)])

    def read(value: Any) -> Any:
        for own in literals:
            if type(own) is type(value) and own == value:
                return value
        try:
            return kind.read(value)
        except Mismatch as mismatch:
            raise Mismatch(mismatch.reason.replace(kind.wants, wants), mismatch.suggestion) from None

    return Kind(wants, read)


def null_or(kind: Kind, default: Any) -> Kind:
    """`kind`, where null is the way to write the default."""
    return Kind(kind.wants, lambda value: default if value is None else kind.read(value))
