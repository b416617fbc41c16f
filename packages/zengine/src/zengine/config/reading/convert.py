"""Conversion of old configs: renamed keys move, shorthands are expanded, ignored keys are left out.

The result resolves to the same plan, without the notices about these keys.  Each change is reported with its reason.
Rejected keys stay, and are rejected again, unless the caller drops them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from zengine.config.grammar.errors import shown
from zengine.config.grammar.scan import dotted
from zengine.config.grammar.table import Key, Section, Support
from zengine.config.keys.root import ROOT

__all__ = ["Converted", "convert"]

Where = tuple[str | int, ...]


@attrs.frozen(kw_only=True)
class Converted:
    """Converted config and the list of changes."""

    data: dict[str, Any]
    changes: tuple[str, ...]  # one line each: "bfloat16 is now bf16"


def convert(data: Mapping[str, Any], *, drop: frozenset[str] = frozenset()) -> Converted:
    """Rewrite `data`.  Pure.

    drop: dotted keys to remove unconditionally, such as those that a ConfigError names.
    """
    rewriting = _Rewriting(drop)
    return Converted(data=rewriting.section(ROOT, data, ()), changes=tuple(rewriting.changes))


class _Rewriting:
    """One walk over the config by the table of keys."""

    def __init__(self, drop: frozenset[str]) -> None:
        self.drop = drop
        self.changes: list[str] = []

    def section(self, section: Section, data: Mapping[str, Any], where: Where) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in self.moved(section, dict(data), where).items():
            kept = self.entry(section, name, value, (*where, name))
            if kept is not _NOTHING:
                found[name] = kept
        return found

    def entry(self, section: Section, name: str, value: Any, where: Where) -> Any:
        """Return the converted value of one key, or _NOTHING to leave it out."""
        key, entry = dotted(where), section.keys.get(name) or next(iter(section.members), None)
        if key in self.drop:
            self.changes.append(f"{key} is dropped: it is rejected here")
            return _NOTHING
        if isinstance(entry, Section):
            return self.inner(entry, value, where)
        if isinstance(entry, Key) and entry.support is Support.IGNORED:
            self.changes.append(f"{key} is left out: {entry.why}")
            return _NOTHING
        return value

    def inner(self, section: Section, value: Any, where: Where) -> Any:
        key = dotted(where)
        if isinstance(value, bool) and value in section.shorthand:
            self.changes.append(f"{key}: {shown(value)} is written out as {shown(section.shorthand[value])}")
            value = section.shorthand[value]
        if section.idle:
            self.changes.append(f"{key} is left out: {section.idle}")
            return _NOTHING
        if not isinstance(value, Mapping):
            return value
        if section.switch in value and value[section.switch] in section.off and not section.is_open:
            self.changes.append(f"{key} is left out: the section is switched off")
            return _NOTHING
        found = self.section(section, value, where)
        return found if found or not value else _NOTHING

    def moved(self, section: Section, members: dict[str, Any], where: Where) -> dict[str, Any]:
        """Return `members` under their current names, at their current paths."""
        found: dict[str, Any] = {}
        for name, value in members.items():
            entry = section.keys.get(name)
            if (
                not (isinstance(entry, Key) and entry.support is Support.RENAMED)
                or dotted((*where, name)) in self.drop
            ):
                found[name] = {**found[name], **value} if isinstance(found.get(name), dict) else value
                continue
            old = dotted((*where, name))
            left_out = value is None or value == "auto"
            converted, home = None if left_out else entry.convert(entry.kind.read(value)), found
            if converted is None:
                self.changes.append(f"{old} is left out: {shown(value)} is the default")
                continue
            for part in entry.target[:-1]:
                home = home.setdefault(part, {})
            home[entry.target[-1]] = converted
            new = dotted((*where, *entry.target))
            self.changes.append(f"{old} is now {new}" + (f" = {shown(converted)}" if converted != value else ""))
        return found


class _Nothing:
    """Sentinel for a key that is left out."""


_NOTHING = _Nothing()
