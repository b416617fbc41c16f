"""The table of a plan: key, value, origin.  It formats rows and knows no plan."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zengine.config.grammar.errors import shown
from zengine.config.plan.parts import PlanRow

__all__ = ["looked_up", "table", "text_of", "value_of"]


def value_of(rows: Iterable[PlanRow], key: str) -> Any:
    """The value that `key` sets.

    Raises:
        KeyError: no row has that key; names the nearest.
    """
    found = dict(rows)
    if key in found:
        return found[key]
    near = difflib.get_close_matches(key, found, n=3) or [name for name in found if name.startswith(key + ".")]
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise KeyError(f"the plan has no value for {key!r}{hint}")


def looked_up(rows: Iterable[PlanRow], key: str, default: Any = None) -> Any:
    """The value that `key` sets; for the name of a section the dict of its values; `default` for anything else."""
    found = dict(rows)
    if key in found:
        return found[key]
    section: dict[str, Any] = {}
    for name, value in found.items():
        if name.startswith(f"{key}."):
            *folders, last = name.removeprefix(f"{key}.").split(".")
            inner = section
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[last] = value
    return section or default


def table(rows: Iterable[PlanRow], origins: Mapping[str, str], notices: Iterable[str]) -> str:
    """The rows in columns, each with its origin, then the notices, one a line."""
    lines = [(key, text_of(value), origins.get(key, "default")) for key, value in rows]
    key_width = max(len(key) for key, _, _ in lines)
    value_width = max(len(value) for _, value, _ in lines)
    text = [f"{key:<{key_width}}  {value:<{value_width}}  {origin}" for key, value, origin in lines]
    return "\n".join([*text, *(f"note: {notice}" for notice in notices)])


def text_of(value: Any) -> str:
    """A value of the plan as it would be written."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, str) else shown(value)
