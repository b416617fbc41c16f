"""Rows of the plan: values carried from the settings to the plan, and from the plan to its table.

A row of the config table names the field of the plan's part that holds its value (`plan=`, by default the key's own
name).  `planned` carries values from the settings to a part; `rows` carries them from the part to the plan's table,
which `table` prints with origins.  So a key that is used as written needs its row and its consumer, and nothing here.
A derived value is passed by name and overrides the row's.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import attrs
import torch

from zengine.config.grammar.errors import shown
from zengine.config.grammar.table import Key

__all__ = ["PlanRow", "lookup", "planned", "rows", "table", "text_of", "value_of"]

PlanRow = tuple[str, Any]  # the key of the config, the value of the plan as the table shows it


def planned(settings: attrs.AttrsInstance, part: type[attrs.AttrsInstance], **derived: Any) -> dict[str, Any]:
    """Return arguments of `part`: keys and sections of `settings` that are a field of it, then the `derived` ones."""
    fields, found = attrs.fields_dict(part), {}
    for field in attrs.fields(type(settings)):
        row = field.metadata["row"]
        name = row.plan or field.name if isinstance(row, Key) else field.name
        if name in fields:
            found[name] = getattr(settings, field.name)
    return {**found, **derived}


def rows(
    prefix: str,
    part: object,
    settings: type[attrs.AttrsInstance],
    *,
    skip: Container[str] = (),
    switches: Container[str] = ("enabled",),
    **derived: Any,
) -> Iterator[PlanRow]:
    """Yield the rows of the keys of `settings` under `prefix`, with the values of `part`.

    skip: keys without a row; derived: values of keys that no single field of `part` holds.
    A section that is off has one row, its switch.  An inner section has rows if `part` holds the section itself.
    """
    for field in attrs.fields(settings):
        row, name = field.metadata["row"], field.name
        if name in skip:
            continue
        if not isinstance(row, Key):
            inner = getattr(part, name, None)
            if isinstance(row.factory, type) and isinstance(inner, row.factory):
                yield from rows(f"{prefix}{name}.", inner, row.factory, switches=(row.switch or "enabled",))
            continue
        held = derived[name] if name in derived else attrgetter(row.plan or name)(part)
        yield f"{prefix}{name}", row.shown(held)
        if name in switches and not held:
            return


def value_of(rows: Iterable[PlanRow], key: str) -> Any:
    """Return the value that `key` sets.

    Raises:
        KeyError: no row has that key; names the nearest.
    """
    found = dict(rows)
    if key in found:
        return found[key]
    near = difflib.get_close_matches(key, found, n=3) or [name for name in found if name.startswith(key + ".")]
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise KeyError(f"the plan has no value for {key!r}{hint}")


def lookup(rows: Iterable[PlanRow], key: str, default: Any = None) -> Any:
    """Return the value that `key` sets, the values of a section as a dict, or `default` for other keys."""
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
    """Format the rows in columns, each with its origin, then the notices, one per line."""
    lines = [(key, text_of(value), origins.get(key, "default")) for key, value in rows]
    key_width = max(len(key) for key, _, _ in lines)
    value_width = max(len(value) for _, value, _ in lines)
    text = [f"{key:<{key_width}}  {value:<{value_width}}  {origin}" for key, value, origin in lines]
    return "\n".join([*text, *(f"note: {notice}" for notice in notices)])


def text_of(value: Any) -> str:
    """Return a value of the plan as it would be written in a config."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, str) else shown(value)
