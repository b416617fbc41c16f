"""Kinds of values: strict types that describe the values they accept.

`"false"` is not false, `"2"` is not 2 and `true` is not 1: such conversions hide mistakes until the run is over.
Lossless conversions are made: a whole number where a fraction is accepted, `5e8` where a whole number is expected,
since configs write bucket sizes that way, and the numbers 1 and 0 for true and false, as in DeepSpeed.

Every kind is idempotent: reading a value that was read gives the same value.  Its JSON Schema accepts the values that
`read` accepts.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from zengine.config.grammar.errors import shown

JsonSchema = Mapping[str, Any]


class Mismatch(Exception):
    """Value of the wrong kind: the reason, and what to write instead if that is known."""

    def __init__(self, reason: str, suggestion: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.suggestion = suggestion


@attrs.frozen
class ValueKind:
    """Set of accepted values; `read` returns a value in canonical form or raises `Mismatch`."""

    wants: str  # "true or false", "a whole number >= 1"
    read: Callable[[Any], Any]
    json_schema: JsonSchema = attrs.field(factory=dict)  # accepts the same values as `read`


def json_type(value: object) -> str:
    """Return the name of a value's type in JSON's terms."""
    names = {bool: "true/false", int: "a number", float: "a number", str: "text", type(None): "null"}
    if isinstance(value, Mapping):
        return "an object {...}"
    if isinstance(value, (list, tuple)):
        return "a list [...]"
    return names.get(type(value), f"a Python {type(value).__name__}")


def _mismatch(value: object, wants: str, suggestion: str = "") -> Mismatch:
    if value == "auto":
        return Mismatch(
            f'"auto" must be resolved by the integration that wrote it; this key needs {wants}',
            "Write the value, or leave the key out for its default.",
        )
    return Mismatch(f"needs {wants}, got {json_type(value)}", suggestion)


def _read_truth(value: object) -> bool:
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    lowered = str(value).lower()
    known = {"true": "true", "false": "false", "1": "true", "0": "false"}
    hint = f"Write {known[lowered]} without quotes." if lowered in known else ""
    raise _mismatch(value, "true or false", hint)


TRUTH = ValueKind("true or false", _read_truth, {"anyOf": [{"type": "boolean"}, {"enum": [0, 1]}]})


def _without_quotes(value: object) -> str:
    """Return the hint for a number that was written as text."""
    try:
        float(str(value))
    except ValueError:
        return ""
    return f"Write {value} without quotes." if isinstance(value, str) else ""


def _check_range(value: float, low: float, high: float, above: float) -> None:
    if value < low:
        raise Mismatch(f"must be >= {low}")
    if value > high:
        raise Mismatch(f"must be <= {high}")
    if value <= above:
        raise Mismatch(f"must be > {above}")


def _json_range(type_name: str, low: float, high: float, above: float = -math.inf) -> JsonSchema:
    bounds = {"minimum": low, "maximum": high, "exclusiveMinimum": above}
    return {"type": type_name, **{name: bound for name, bound in bounds.items() if math.isfinite(bound)}}


def whole(low: float = 0, high: float = sys.maxsize) -> ValueKind:
    """Return the kind of whole numbers in [low, high]; 5e8 is one, true is not."""
    wants = "a whole number" + (f" >= {low}" if low > -math.inf else "")

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _mismatch(value, wants, _without_quotes(value))
        if isinstance(value, float) and not value.is_integer():
            raise Mismatch(f"needs {wants}")
        _check_range(value, low, high, -math.inf)
        return int(value)

    return ValueKind(wants, read, _json_range("integer", low, high))


COUNT = whole(0)


def _read_positive(value: Any) -> int:
    count: int = COUNT.read(value)
    return max(1, count)


POSITIVE = ValueKind("a whole number >= 1 (0 counts as 1)", _read_positive, COUNT.json_schema)


def number(low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> ValueKind:
    """Return the kind of finite numbers in [low, high] and above `above`; whole ones become float."""
    wants = "a number"

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _mismatch(value, wants, _without_quotes(value))
        if not abs(value) <= sys.float_info.max:  # NaN is not
            raise Mismatch("must be finite")
        _check_range(value, low, high, above)
        return float(value)

    return ValueKind(wants, read, _json_range("number", low, high, above))


def _read_text(value: object) -> str:
    if isinstance(value, str) and value != "auto":
        return value
    raise _mismatch(value, "text")


TEXT = ValueKind("text", _read_text, {"type": "string", "not": {"const": "auto"}})


def choice(*names: str, fold: Callable[[str], str] = str) -> ValueKind:
    """Return the kind of one name among several; `fold` (`str.upper`, `str.lower`) makes it case-insensitive."""
    wants = "one of " + ", ".join(f'"{name}"' for name in names)

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise _mismatch(value, wants)
        name = fold(value)
        if name not in names:
            raise _mismatch(value, wants) if value == "auto" else Mismatch(f"must be {wants}")
        return name

    return ValueKind(wants, read, {"enum": list(names)} if fold is str else _any_case(names))


def _any_case(names: tuple[str, ...]) -> JsonSchema:
    """Return a schema with the names, for completion, and a case-insensitive pattern."""
    spellings = [
        "".join(f"[{a.upper()}{a.lower()}]" if a.isalpha() else re.escape(a) for a in name) for name in names
    ]
    return {"anyOf": [{"enum": list(names)}, {"type": "string", "pattern": f"^({'|'.join(spellings)})$"}]}


_DTYPES = {
    "float32": ("fp32", "float32", "float", "torch.float32"),
    "float64": ("fp64", "float64", "double", "torch.float64"),
    "float16": ("fp16", "float16", "half", "torch.float16"),
    "bfloat16": ("bf16", "bfloat16", "torch.bfloat16"),
}


def dtype_schema(*dtypes: str) -> JsonSchema:
    """Return the schema of every accepted spelling of these torch dtypes, in any case."""
    return _any_case(tuple(spelling for name in dtypes for spelling in _DTYPES[name]))


def _read_dtype(value: object) -> str:
    for name in _DTYPES:
        if isinstance(value, str) and value.lower() in _DTYPES[name]:
            return name
    wants = 'one of "fp32", "fp16", "bf16", "fp64"'
    raise (_mismatch(value, wants) if value == "auto" or not isinstance(value, str) else Mismatch(f"must be {wants}"))


DTYPE = ValueKind('one of "fp32", "fp16", "bf16", "fp64"', _read_dtype, dtype_schema(*_DTYPES))


def _read_list(value: object) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise _mismatch(value, "a list [...]")


LIST = ValueKind("a list [...]", _read_list, {"type": "array"})


def list_of(member: ValueKind, wants: str) -> ValueKind:
    """Return the kind of lists whose members are of one kind."""

    def read(value: object) -> tuple[Any, ...]:
        return tuple(member.read(each) for each in _read_list(value))

    return ValueKind(wants, read, {"type": "array", "items": member.json_schema})


NAMES = list_of(TEXT, "a list of names")


def _read_mapping(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise _mismatch(value, "an object {...}")


MAPPING = ValueKind("an object {...}", _read_mapping, {"type": "object"})
ANYTHING = ValueKind("any value", lambda value: value)


def literal(kind: ValueKind, *literals: object) -> ValueKind:
    """Extend `kind` by literal values: `literal(TRUTH, "auto")`."""
    wants = " or ".join([kind.wants.replace(" or ", ", "), *(shown(value) for value in literals)])

    def read(value: Any) -> Any:
        for own in literals:
            if type(own) is type(value) and own == value:
                return value
        try:
            return kind.read(value)
        except Mismatch as mismatch:
            raise Mismatch(mismatch.reason.replace(kind.wants, wants), mismatch.suggestion) from None

    return ValueKind(wants, read, {"anyOf": [kind.json_schema, {"enum": list(literals)}]})


def null_or(kind: ValueKind, default: Any) -> ValueKind:
    """Extend `kind` by null, which means the default."""

    def read(value: Any) -> Any:
        return default if value is None else kind.read(value)

    return ValueKind(kind.wants, read, {"anyOf": [kind.json_schema, {"type": "null"}]})
