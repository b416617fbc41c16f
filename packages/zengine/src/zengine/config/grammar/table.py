"""Rows of the config table: one for each key that a config may contain.

A row (`Key`) is the complete definition of a key: the kind of its value, its default, one line of documentation,
DeepSpeed's other names for it, and the field of the plan that holds its value.  The strict schema, the suggestions
for misspelt keys, the plan's table, CONFIG.md and the JSON Schema are generated from the rows.

A config that was written for another engine must run, or fail at once with the key, the reason and the replacement.
So every known key has a `Support`, and an unknown key is an error.  A section may have a switch, the key that turns
it on; while it is off, its other keys are checked for spelling and type, and a notice lists them as without effect.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from zengine.config.grammar.kinds import ANYTHING, TRUTH, ValueKind


class Support(enum.Enum):
    """Support for a key."""

    HONOURED = "honoured"  # a field of the settings
    FIXED = "fixed"  # accepted at the values that match the engine's behaviour; others are not available yet
    IGNORED = "ignored"  # accepted with a notice, unless the value matches the engine's behaviour
    RENAMED = "renamed"  # another name: read as the present one, with a notice
    REJECTED = "rejected"  # an error with the reason and the replacement
    SECTION = "section"  # an object with keys of its own


def _unchanged(value: Any) -> Any:
    return value


@attrs.frozen(kw_only=True)
class Key:
    """One key that holds a value."""

    support: Support
    kind: ValueKind = ANYTHING
    matching: tuple[object, ...] = ()  # values that match the engine's behaviour
    why: str = ""  # the reason, for a notice or an error
    hint: str = ""  # what to write, if `matching` does not imply it
    target: tuple[str, ...] = ()  # RENAMED: path of the new key within the same section
    convert: Callable[[Any], Any] = _unchanged  # RENAMED: old value -> new value; None: as if it were not given
    default: object = None  # HONOURED
    doc: str = ""  # HONOURED: one line of documentation
    plan: str = ""  # HONOURED: field of the plan's part that holds the value; "" = the name of the key
    empty: object = None  # HONOURED: shown in the plan's table for 0, "" and (); None = the value itself
    show: Callable[[Any], Any] = _unchanged  # HONOURED: the plan's value -> its form in the table
    aliases: tuple[str, ...] = ()  # HONOURED: old names in the same section
    is_secret: bool = False  # HONOURED: `repr` omits it

    def shown(self, value: Any) -> Any:
        """Return the form of `value` in the plan's table."""
        if self.empty is not None and not value and not isinstance(value, bool):
            return self.empty
        value = self.show(value)
        if isinstance(value, enum.Enum):
            return value.value
        return ", ".join(map(str, value)) if isinstance(value, tuple) else value


@attrs.frozen(kw_only=True)
class Section:
    """An object with named keys."""

    keys: Mapping[str, Key | Section] = attrs.field(factory=dict)
    factory: Callable[..., Any] = dict  # makes the settings from the honoured keys
    switch: str = ""  # the key that turns the section on; "" = always on
    off: tuple[object, ...] = (False,)  # values of the switch that turn it off; the first is its default
    rejection: str = ""  # reason to reject the section wherever it is given; "" = accepted
    idle: str = ""  # reason why the whole section has no effect, for a notice
    members: tuple[Section, ...] = ()  # none, or one section for all members, whose names the user chooses
    is_open: bool = False  # names are not checked: only the switch is known
    shorthand: Mapping[bool, Mapping[str, object]] = attrs.field(factory=dict)  # `"section": true` means this

    @property
    def support(self) -> Support:
        return Support.REJECTED if self.rejection else Support.SECTION


Row = Key | Section


# -- fields of settings classes ------------------------------------------------------------------


def setting(
    kind: ValueKind,
    default: Any,
    doc: str,
    *,
    plan: str = "",
    empty: object = None,
    show: Callable[[Any], Any] = _unchanged,
    aliases: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """Return the attrs field of a settings class for one key of the config; `repr` omits a secret."""
    key = Key(
        support=Support.HONOURED,
        kind=kind,
        default=default,
        doc=doc,
        plan=plan,
        empty=empty,
        show=show,
        aliases=aliases,
        is_secret=secret,
    )
    if isinstance(default, dict):
        return attrs.field(factory=dict, metadata={"row": key})
    return attrs.field(default=default, repr=not secret, metadata={"row": key})


def section(settings: type[attrs.AttrsInstance], others: Mapping[str, Row] | None = None, **options: Any) -> Any:
    """Return the attrs field of a settings class for an inner section with its own settings class."""
    return attrs.field(factory=settings, metadata={"row": section_of(settings, others, **options)})


def named_members(member: Section, factory: Callable[..., Any], *, in_order: bool = False) -> Any:
    """Return the attrs field for a section whose members have names that the user chooses (or none, `in_order`)."""
    row = Section(members=(member,), factory=factory)
    return attrs.field(factory=tuple if in_order else dict, metadata={"row": row})


def section_of(
    settings: type[attrs.AttrsInstance], others: Mapping[str, Row] | None = None, **options: Any
) -> Section:
    """Return the section of a settings class; `others` are known keys that the class does not store."""
    keys: dict[str, Row] = {}
    for field in attrs.fields(settings):
        row: Row = field.metadata["row"]
        keys[field.name] = row
        if isinstance(row, Key):
            keys |= {alias: renamed(row.kind, field.name) for alias in row.aliases}
    return Section(keys={**keys, **(others or {})}, factory=settings, **options)


# -- keys that settings do not store -------------------------------------------------------------


def fixed(kind: ValueKind, *matching: object, why: str, hint: str = "") -> Key:
    """Return a key that accepts only `matching`; `why` is completed by "... is not available yet"."""
    return Key(support=Support.FIXED, kind=kind, matching=matching, why=f"{why} is not available yet", hint=hint)


def ignored(kind: ValueKind, *matching: object, why: str) -> Key:
    """Return a key that is accepted with a notice, or without one if its value is in `matching`."""
    return Key(support=Support.IGNORED, kind=kind, matching=matching, why=why)


def renamed(
    kind: ValueKind, *target: str, convert: Callable[[Any], Any] = _unchanged, what: str = "an old name"
) -> Key:
    """Return an old name, or `what`, of the key at `target`."""
    return Key(support=Support.RENAMED, kind=kind, target=target, convert=convert, why=what)


def rejected(why: str, hint: str = "") -> Key:
    """Return a key that is never accepted."""
    return Key(support=Support.REJECTED, why=why, hint=hint)


def unavailable(what: str, keys: Mapping[str, Row], hint: str = "", **options: Any) -> Section:
    """Return the section of a feature that is not available yet: accepted while `enabled` is false."""
    enabled = fixed(TRUTH, False, why=what, hint=hint)
    return Section(keys={"enabled": enabled, **keys}, switch="enabled", **options)


def all_ignored(why: str, **kinds: ValueKind) -> dict[str, Row]:
    """Return several keys that are ignored for the same reason."""
    return {name: ignored(kind, why=why) for name, kind in kinds.items()}


def idle_section(why: str, **kinds: ValueKind) -> Section:
    """Return a section that is accepted and has no effect."""
    return Section(idle=why, keys=all_ignored(why, **kinds))


def checked_only(**kinds: ValueKind) -> dict[str, Row]:
    """Return keys of a section that is either off or rejected: checked for spelling and type, never applied."""
    return all_ignored(SECTION_IS_OFF, **kinds)


SECTION_IS_OFF = "the section is off"
COMMENT_KEYS = r"^(_+comment|comments?$|//|#|\$schema$)"  # keys for readers and editors, anywhere


def walk(section: Section, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Row]]:
    """Yield every row under `section` with its path; a name that the user chooses is written `*`."""
    for name, row in section.keys.items():
        yield (*path, name), row
        if isinstance(row, Section):
            yield from walk(row, (*path, name))
    for member in section.members:
        yield from walk(member, (*path, "*"))
