"""One entry for each key that a config may hold, and what we do about it.

A config made for another engine must run, or fail at once with the key, the reason and the replacement.  So each
known key is given one `Care`; a key without an entry is a mistake.  A section may have a switch, the key that
turns it on: while it is off the other keys are checked for spelling and type, and said to have no effect.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from zengine.config.kinds import ANYTHING, TRUTH, Kind


class Care(enum.Enum):
    """What happens to a key."""

    HONOURED = "honoured"  # a field of our settings
    LIMITED = "limited"  # accepted at the values that say what happens anyway; others are not available yet
    NO_EFFECT = "no effect"  # accepted, and said once unless its value says what happens anyway
    RENAMED = "renamed"  # an old name: read as the new one, and said once
    REFUSED = "refused"  # an error with the reason and the replacement
    SECTION = "section"  # an object with keys of its own


@attrs.frozen(kw_only=True)
class Key:
    """One key that holds a value."""

    care: Care
    kind: Kind = ANYTHING
    natural: tuple[object, ...] = ()  # values that say what happens anyway
    why: str = ""  # the reason, for a notice or an error
    instead: str = ""  # what to write, when `natural` does not say it
    target: tuple[str, ...] = ()  # RENAMED: where the value goes, seen from the same section
    convert: Callable[[Any], Any] = lambda value: value  # RENAMED: old value -> new value
    default: object = None  # HONOURED
    doc: str = ""  # HONOURED: one line for people


@attrs.frozen(kw_only=True)
class Section:
    """An object with named keys.

    `builds` is the class of its honoured keys; `each` describes members whose names the user chooses;
    `why_not` refuses the section as a whole when it is given at all.
    """

    keys: Mapping[str, Key | Section] = attrs.field(factory=dict)
    builds: Callable[..., Any] = dict
    switch: str = ""  # the key that turns the section on; "" = always on
    off: tuple[object, ...] = (False,)  # values of the switch that turn it off; the first is its default
    why_not: str = ""
    each: tuple[Section, ...] = ()  # none, or one description for all user-named members
    is_open: bool = False  # names are not checked: we know only the switch
    shorthand: Mapping[bool, Mapping[str, object]] = attrs.field(factory=dict)  # `"section": true` means this

    @property
    def care(self) -> Care:
        return Care.REFUSED if self.why_not else Care.SECTION


Entry = Key | Section


def setting(kind: Kind, default: Any, doc: str) -> Any:
    """A field of a settings class that is a key of the config.  (A section is a plain field.)"""
    metadata = {"entry": Key(care=Care.HONOURED, kind=kind, default=default, doc=doc)}
    if isinstance(default, dict):
        return attrs.field(factory=dict, metadata=metadata)
    return attrs.field(default=default, metadata=metadata)


def honoured(builds: type[attrs.AttrsInstance], others: Mapping[str, Entry] | None = None, **options: Any) -> Section:
    """The section of a settings class, with the keys that we know and do not keep in it."""
    own = {field.name: field.metadata["entry"] for field in attrs.fields(builds) if "entry" in field.metadata}
    return Section(keys={**own, **(others or {})}, builds=builds, **options)


def limited(kind: Kind, *natural: object, why: str, instead: str = "") -> Key:
    """Other values than `natural` are refused: `why` completes "... is not available yet"."""
    return Key(care=Care.LIMITED, kind=kind, natural=natural, why=f"{why} is not available yet", instead=instead)


def no_effect(kind: Kind, *natural: object, why: str) -> Key:
    """Accepted, and said once unless the value is `natural`."""
    return Key(care=Care.NO_EFFECT, kind=kind, natural=natural, why=why)


def renamed(kind: Kind, *target: str, convert: Callable[[Any], Any] = lambda value: value) -> Key:
    """An old name of the key at `target`."""
    return Key(care=Care.RENAMED, kind=kind, target=target, convert=convert)


def refused(why: str, instead: str = "") -> Key:
    """Never accepted."""
    return Key(care=Care.REFUSED, why=why, instead=instead)


def switched(what: str, keys: Mapping[str, Entry], instead: str = "", **options: Any) -> Section:
    """A section that is not available yet, accepted while `enabled` is false; `instead` says what to do."""
    enabled = limited(TRUTH, False, why=what, instead=instead)
    return Section(keys={"enabled": enabled, **keys}, switch="enabled", **options)


def all_without_effect(why: str, **kinds: Kind) -> dict[str, Entry]:
    """Several keys that tune the same absent thing."""
    return {name: no_effect(kind, why=why) for name, kind in kinds.items()}


def muted(**kinds: Kind) -> dict[str, Entry]:
    """Keys of a section that is either off or refused, so that they never act."""
    return all_without_effect("the section is off", **kinds)


def walk(section: Section, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Entry]]:
    """Every entry under `section` with its path; user-named members are written `*`."""
    for name, entry in section.keys.items():
        yield (*path, name), entry
        if isinstance(entry, Section):
            yield from walk(entry, (*path, name))
    for member in section.each:
        yield from walk(member, (*path, "*"))
