"""Settings of a document: one walk that visits every key once.

The walk does not stop at a mistake: a bad leaf keeps its default and is reported, so the report contains all of them.
Old names are moved to their new place before their section is read; `moved` maps them back, so every message points
at the key as it was written.  An unknown key is reported with the key that was probably meant and the section where
it belongs; option names of optimizers and schedules are searched as well.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import attrs

from zengine.config.grammar.errors import NOTHING, Place, Problem, shown
from zengine.config.grammar.kinds import MAPPING, TRUTH, Mismatch
from zengine.config.grammar.scan import Document, Path, dotted
from zengine.config.grammar.suggest import look_alike, nearest, one_of
from zengine.config.grammar.table import COMMENT_KEYS, Key, Row, Section, Support, walk
from zengine.config.keys.root import ROOT, Settings
from zoptim import OPTIMIZER_OPTIONS, SCHEDULE_OPTIONS

SWITCHED_OFF = "the section is switched off"
LEFT_AUTO = 'it is "auto", so its default applies'
DOTTED = "DeepSpeed reads no dotted names; write the key inside its section"
_LISTED = 12  # a section with at most so many keys lists them for an unknown key without a near one


class Mode(enum.Enum):
    """Treatment of the keys of a section."""

    ACTIVE = "active"  # they have an effect
    OFF = "off"  # the section is off: a notice lists the given keys as without effect
    CHECKED = "checked"  # the section is rejected as a whole: only spelling and types are checked


@attrs.frozen(kw_only=True)
class Reading:
    """Result of one walk."""

    settings: Settings
    given: Mapping[str, Place]  # keys that were written and have an effect, with their places
    notices: tuple[str, ...]
    problems: tuple[Problem, ...]


def structure(document: Document) -> Reading:
    """Read `document` by the table.  Does not raise: the reading carries the problems."""
    walk = _Walk(document)
    settings = walk.section(ROOT, document.data, (), Mode.ACTIVE)
    return Reading(
        settings=settings if isinstance(settings, Settings) else Settings(),
        given=walk.given,
        notices=walk.all_notices(),
        problems=tuple(walk.problems),
    )


@attrs.frozen(kw_only=True)
class SectionReading:
    """Result of reading one section alone."""

    members: Mapping[str, Any]  # the given keys, under their present names
    notices: tuple[str, ...]
    problems: tuple[Problem, ...]


def read_section(section: Section, data: Mapping[str, Any], name: str) -> SectionReading:
    """Read one section, as if it were the whole document.  Does not raise: the reading carries the problems.

    name: of the section, for messages.
    """
    walk = _Walk(Document(source="dict", data=data, places={}))
    members = walk.translated(section, dict(data), (name,))
    walk.leave_autos(section, members, (name,))
    walk.section(section, members, (name,), Mode.ACTIVE)
    return SectionReading(members=members, notices=walk.all_notices(), problems=tuple(walk.problems))


class _Walk:
    """One walk and its results.  Invariant: every key of the document is visited exactly once."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.given: dict[str, Place] = {}
        self.problems: list[Problem] = []
        self.moved: dict[Path, Path] = {}  # new path of a renamed key -> path as written
        self.typed: dict[Path, object] = {}  # new path of a renamed key -> value as written
        self.notices: list[str] = []
        self.idle: dict[tuple[str, str], list[Path]] = {}  # (top key, reason) -> keys without effect

    def section(self, section: Section, data: object, path: Path, outer: Mode) -> Any:
        """Return the settings object of a section, with defaults for missing and bad keys."""
        if isinstance(data, bool) and data in section.shorthand:
            self.notify(path, f'"{dotted(path)}": {shown(data)} is read as {shown(section.shorthand[data])}')
            data = section.shorthand[data]
        try:
            members = self.translated(section, MAPPING.read(data), path)
        except Mismatch as mismatch:
            self.report(path, mismatch.reason, _section_hint(section, data), given=data)
            return section.factory()
        self.leave_autos(section, members, path)
        if section.idle and not members and outer is Mode.ACTIVE:
            self.ignore(path, section.idle)
        mode = self.mode(section, members, path) if outer is Mode.ACTIVE else outer
        found = {
            name: self.entry(section, name, value, (*path, name), outer if name == section.switch else mode)
            for name, value in members.items()
        }
        return section.factory(**{name: value for name, value in found.items() if value is not NOTHING})

    def entry(self, section: Section, name: str, value: object, path: Path, mode: Mode) -> Any:
        """Return the value of one key for its section's settings, or NOTHING."""
        entry = section.keys.get(name)
        if section.members:
            return self.inner_section(section.members[0], value, path, mode)
        if isinstance(entry, Section):
            return self.inner_section(entry, value, path, mode)
        if isinstance(entry, Key):
            return self.key(entry, value, path, mode)
        if re.match(COMMENT_KEYS, name):
            return NOTHING
        if len(path) == 1 and name in _dotted_names():
            self.ignore(path, DOTTED, name.partition(".")[0])
            return NOTHING
        if not section.is_open or nearest(name, section.keys, tolerance=1):
            self.report(path, "unknown key", _suggestion(name, section), given=value)
        elif mode is Mode.OFF:
            self.ignore(path, SWITCHED_OFF)
        return NOTHING

    def inner_section(self, section: Section, value: object, path: Path, mode: Mode) -> Any:
        if value is None:  # null means an absent section
            return NOTHING
        if section.members and isinstance(value, (list, tuple)):
            members = [
                self.section(section.members[0], each, (*path, index), mode) for index, each in enumerate(value)
            ]
            return NOTHING if any(isinstance(member, dict) for member in members) else tuple(members)
        if section.rejection and mode is Mode.ACTIVE:
            self.report(path, section.rejection, "Remove the section.")
            mode = Mode.CHECKED
        built = self.section(section, value, path, mode)
        return NOTHING if isinstance(built, dict) else built

    def key(self, entry: Key, value: object, path: Path, mode: Mode) -> Any:
        if entry.support is Support.REJECTED:
            if mode is Mode.ACTIVE:
                self.report(path, entry.why, entry.hint, given=value)
            return NOTHING
        try:
            read = entry.kind.read(value)
        except Mismatch as mismatch:
            self.report(path, mismatch.reason, mismatch.suggestion, given=value)
            return NOTHING
        if mode is Mode.OFF:
            self.ignore(path, SWITCHED_OFF)
        elif mode is Mode.ACTIVE:
            self.act(entry, read, value, path)
        return read if entry.support is Support.HONOURED else NOTHING

    def act(self, entry: Key, read: object, value: object, path: Path) -> None:
        """Record the effect of a key in a section that is on."""
        matches = _among(read, entry.matching)
        if entry.support is Support.HONOURED or (entry.support is Support.FIXED and matches):
            if value is not None:  # null means the default
                self.given[dotted(path)] = self.place(path)
        elif matches:
            return
        elif entry.support is Support.IGNORED:
            self.ignore(path, entry.why)
        else:
            self.report(path, entry.why, entry.hint or _accepted(entry), given=value)

    def leave_autos(self, section: Section, members: dict[str, Any], path: Path) -> None:
        """Remove keys of a section that are "auto" and have no such value, as DeepSpeed does."""
        for name in [name for name, value in members.items() if value == "auto" and path]:
            entry = section.keys.get(name)
            if entry is not None and entry.support is not Support.REJECTED and not _accepts(entry, "auto"):
                del members[name]
                if not isinstance(entry, Key) or entry.empty != "auto":  # where the default means "auto", all is said
                    self.ignore((*path, name), LEFT_AUTO)

    def mode(self, section: Section, members: Mapping[str, Any], path: Path) -> Mode:
        """Return the mode of a section, by the value of its switch."""
        entry = section.keys.get(section.switch)
        if not isinstance(entry, Key):
            return Mode.ACTIVE
        is_ours = entry.support is Support.HONOURED
        try:
            value = entry.kind.read(members.get(section.switch, entry.default if is_ours else section.off[0]))
        except Mismatch:  # reported when the switch itself is read
            return Mode.CHECKED
        if _among(value, section.off):
            return Mode.OFF
        return Mode.ACTIVE if is_ours else Mode.CHECKED

    def translated(self, section: Section, members: dict[str, Any], path: Path) -> dict[str, Any]:
        """Return `members` with old names replaced by new ones."""
        for name, value in list(members.items()):
            entry = section.keys.get(name) if isinstance(name, str) else None
            if isinstance(entry, Key) and entry.support is Support.RENAMED:
                del members[name]
                self.move(entry, members, (*path, name), value)
        return members

    def move(self, entry: Key, members: dict[str, Any], old: Path, value: object) -> None:
        new = (*old[:-1], *entry.target)
        if value is None:
            return
        if value == "auto" and len(old) > 1:
            self.ignore(old, LEFT_AUTO)
            return
        try:
            converted = entry.convert(entry.kind.read(value))
        except Mismatch as mismatch:
            self.report(old, mismatch.reason, mismatch.suggestion, given=value)
            return
        if converted is None:
            return
        home: Any = members
        for part in entry.target[:-1]:
            if not isinstance(home.get(part) or {}, Mapping):
                return  # reported when that section is read
            home[part] = dict(home.get(part) or {})
            home = home[part]
        if entry.target[-1] in home:
            if home[entry.target[-1]] != converted:
                other = self.place(new).origin()
                self.report(
                    old, f'{entry.why} of "{dotted(new)}", which is also given ({other})', "Keep one of them."
                )
            return
        home[entry.target[-1]] = converted
        self.moved[new], self.typed[new] = old, value
        text = f" = {shown(converted)}" if entry.kind is TRUTH else ""
        self.notify(old, f'"{dotted(old)}" is {entry.why}: read as "{dotted(new)}"{text}')

    def written(self, path: Path) -> Path:
        """Return the path of a key as the user wrote it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.moved:
                return (*self.moved[path[:end]], *path[end:])
        return path

    def place(self, path: Path) -> Place:
        return self.document.place(self.written(path))

    def report(self, path: Path, reason: str, suggestion: str = "", given: object = NOTHING) -> None:
        written = self.written(path)
        place = self.document.place(written)
        if path in self.moved:  # the message has both names: the notice about the renaming is not shown
            reason, given = f'another name of "{dotted(path)}": {reason}', self.typed[path]
            suggestion = "Leave it out."
        self.problems.append(
            Problem(place=place, key=dotted(written), given=given, reason=reason, suggestion=suggestion)
        )

    def notify(self, path: Path, text: str) -> None:
        self.notices.append(f"{self.place(path).origin()}: {text}")

    def all_notices(self) -> tuple[str, ...]:
        """Return the renamings, and one line for each reason why keys have no effect."""
        return (*self.notices, *(self.no_effect(why, paths) for (_, why), paths in self.idle.items()))

    def ignore(self, path: Path, why: str, group: str = "") -> None:
        """Record a key that is accepted and has no effect; keys of a group (the top key) share a notice."""
        self.idle.setdefault((group or str(path[0]), why), []).append(path)

    def no_effect(self, why: str, paths: list[Path]) -> str:
        names = ", ".join(dotted(path) for path in paths)
        verb = "has" if len(paths) == 1 else "have"
        return f"{self.place(paths[0]).origin()}: {names} {verb} no effect here: {why}"


def _section_hint(section: Section, data: object) -> str:
    """Return the hint for a value in place of an object."""
    if isinstance(data, bool) and section.switch == "enabled":
        return f'Write {{"enabled": {shown(data)}}}.'
    if isinstance(data, str) and section.switch == "device":
        return f'Write {{"device": {shown(data)}}}.'
    return 'Write {"type": ' + f"{shown(data)}}}." if isinstance(data, str) and "type" in section.keys else ""


def _among(value: object, matching: tuple[object, ...]) -> bool:
    """Return True if `value` is in `matching`, with true and 1 distinct."""
    return any(type(value) is type(other) and value == other for other in matching)


def _accepts(entry: Row, value: object) -> bool:
    if isinstance(entry, Section):
        return False
    try:
        entry.kind.read(value)
    except Mismatch:
        return False
    return True


@lru_cache(maxsize=1)
def _dotted_names() -> frozenset[str]:
    """Return the paths of all keys inside sections."""
    return frozenset(dotted(path) for path, _ in walk(ROOT) if len(path) > 1)


def _accepted(entry: Key) -> str:
    if not entry.matching:
        return "Leave it out."
    return f"Set it to {' or '.join(shown(value) for value in entry.matching)}, or leave it out."


def _suggestion(name: str, section: Section) -> str:
    """Return a sentence for a key that `section` does not know."""
    elsewhere = _belongs(name)
    close = nearest(name, section.keys, tolerance=1)
    if not close and not elsewhere:
        close = nearest(name, section.keys, tolerance=2 if len(name) > 5 else 1)
        close = close or look_alike(name, section.keys) or nearest(name, section.keys)
    if close or elsewhere:
        question = f"Did you mean {one_of(close[:3])}?" if close else ""
        return " ".join(part for part in (question, elsewhere) if part)
    far = nearest(name, _homes(), tolerance=max(1, len(name) // 5))
    if len(far) == 1 and _belongs(far[0]):
        return f'Did you mean "{far[0]}"? {_belongs(far[0])}'
    if len(section.keys) <= _LISTED:
        return f"Known keys here: {', '.join(section.keys)}."
    return "No known key is near: remove it."


def _belongs(name: str) -> str:
    """Return a sentence with the section where a key belongs; "" if no section has it, or too many do."""
    homes = _homes().get(name, ())
    if not homes or len(homes) > 3:
        return ""
    where = "at the top level" if homes == ("",) else f"under {one_of(home or 'the top level' for home in homes)}"
    return f'"{name}" belongs {where}.'


@lru_cache(maxsize=1)
def _homes() -> dict[str, tuple[str, ...]]:
    """Return key name -> the sections that have it; "" is the top level."""
    homes: dict[str, list[str]] = {}
    for path, _ in walk(ROOT):
        if "*" not in path:
            homes.setdefault(path[-1], []).append(".".join(path[:-1]))
    for home, table in (("optimizer.params", OPTIMIZER_OPTIONS), ("scheduler.params", SCHEDULE_OPTIONS)):
        for name in sorted({name for options in table.values() for name in options}):
            homes.setdefault(name, []).append(home)
    return {name: tuple(sections) for name, sections in homes.items()}
