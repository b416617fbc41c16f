"""Parts of the plan and the keys that set them.

A row names the field of the plan's part that holds its value (`plan=`, by default the key's own name).  `planned`
carries values from the settings to a part; `rows` carries them from the part to the plan's table.  So a key that
means what it says needs its row and its consumer, and nothing here.  A value that is derived is given by name, and
goes before the row's.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from operator import attrgetter
from typing import Any

import attrs

from zengine.config.grammar.table import Key

__all__ = ["PlanRow", "planned", "rows"]

PlanRow = tuple[str, Any]  # the key of the config, the value of the plan as the table shows it


def planned(settings: attrs.AttrsInstance, part: type[attrs.AttrsInstance], **derived: Any) -> dict[str, Any]:
    """Arguments of `part`: the values of `settings` whose rows name a field of it, then the `derived` ones."""
    fields, found = attrs.fields_dict(part), {}
    for field in attrs.fields(type(settings)):
        row = field.metadata["row"]
        name = row.plan or field.name if isinstance(row, Key) else ""
        if name in fields:
            found[name] = getattr(settings, field.name)
    return {**found, **derived}


def rows(
    prefix: str, part: object, settings: type[attrs.AttrsInstance], *, skip: Container[str] = (), **derived: Any
) -> Iterator[PlanRow]:
    """Rows of the keys of `settings` under `prefix`, with the values of `part`.

    skip: keys without a row; derived: values of keys that no single field of `part` holds.
    A section that is off has one row, `enabled`.  Inner sections have theirs where `part` holds the section itself.
    """
    for field in attrs.fields(settings):
        row, name = field.metadata["row"], field.name
        if name in skip:
            continue
        if not isinstance(row, Key):
            inner = getattr(part, name, None)
            if isinstance(row.factory, type) and isinstance(inner, row.factory):
                yield from rows(f"{prefix}{name}.", inner, row.factory)
            continue
        value = row.shown(derived[name] if name in derived else attrgetter(row.plan or name)(part))
        yield f"{prefix}{name}", value
        if name == "enabled" and not value:
            return
