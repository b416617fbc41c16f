"""JSON values with their location, and type checks on them.

For readers of files that may be damaged or forged: a value that is missing, out of range or of the wrong type raises
an error that names its location.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NoReturn

import attrs

from zckpt.errors import CheckpointCorrupt, CheckpointError
from zckpt.format.canonical import JSON

MAX_INTEGER = 2**62
_REQUIRED = object()


@attrs.define(eq=False)
class Node:
    """A JSON value, its location, and type checks on it."""

    value: JSON
    where: str  # 'tensors["w"].pieces[0].span'
    error: type[CheckpointError] = CheckpointCorrupt  # raised by a failed check

    def fail(self, reason: str) -> NoReturn:
        raise self.error(f"{self.where or 'top level'}: {reason}")

    def at(self, value: JSON, step: str) -> Node:
        """Child node one step further in."""
        return Node(value, self.where + step, self.error)

    def member(self, name: str, default: JSON = _REQUIRED) -> Node:
        """The member of this name, others allowed.  Raises `error` if it is absent and has no default."""
        found = self.members().get(name)
        if found is None and default is _REQUIRED:
            self.fail(f"has no {name!r}")
        return self.at(default, f"[{name!r}]") if found is None else found

    def members(self) -> dict[str, Node]:
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, is {_kind(self.value)}")
        return {key: self.at(value, f"[{key[:80]!r}]") for key, value in self.value.items()}

    def fields(self, *names: str) -> list[Node]:
        """The members of these names in this order; missing or unknown members raise `error`."""
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, is {_kind(self.value)}")
        if self.value.keys() != set(names):
            missing = [name for name in names if name not in self.value]
            unknown = [str(key)[:80] for key in self.value if key not in names]
            self.fail(
                "; ".join(
                    f"{what} {keys[:10]}" for what, keys in (("missing", missing), ("unknown", unknown)) if keys
                )
            )
        dot = "." if self.where else ""
        return [self.at(self.value[name], f"{dot}{name}") for name in names]

    def items(self) -> list[Node]:
        if not isinstance(self.value, list):
            self.fail(f"must be an array, is {_kind(self.value)}")
        return [self.at(value, f"[{i}]") for i, value in enumerate(self.value)]

    def integer(self, low: int = 0, high: int = MAX_INTEGER) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            self.fail(f"must be an integer from {low} to {high}, is {_kind(self.value)}")
        return self.value

    def number(self, low: float = -math.inf) -> float:
        """A finite number of at least `low`, unchanged."""
        is_number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if not is_number or not max(low, -sys.float_info.max) <= self.value <= sys.float_info.max:
            self.fail(f"must be a finite number{f' of at least {low:g}' * (low > -math.inf)}, is {_kind(self.value)}")
        return self.value  # type: ignore[no-any-return]

    def pair(self) -> tuple[int, int]:
        items = self.items()
        if len(items) != 2:
            self.fail(f"must be a pair, has {len(items)} items")
        return items[0].integer(), items[1].integer()

    def text(self, problem: Callable[[str], str] = lambda _: "") -> str:
        if not isinstance(self.value, str):
            self.fail(f"must be a string, is {_kind(self.value)}")
        if trouble := problem(self.value):
            self.fail(f"{self.value[:80]!r}: {trouble}")
        return self.value


def _kind(value: JSON) -> str:
    text = repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
