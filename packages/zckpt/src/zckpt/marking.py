"""Names of folders on a store that cannot rename a folder at once.

Such a store (S3 and its kind, SFTP, HDFS, ...) has objects only, and renaming a folder copies and deletes them one
by one.  So each attempt to save writes into a folder of its own that never moves, `<tag>@<attempt>/`, and the name
that the rest of this package sees follows from which markers, tiny objects, lie in it:

    no `committed`                   .tmp-<tag>-<attempt>     never read
    `committed`                      <tag>                    a checkpoint
    `committed` and `aside-<other>`  .old-<tag>-<other>       moved aside by the attempt <other>

A rename is thus one small object made or removed: it happens or it does not, whatever dies.  A marker counts by its
presence, so half a write of one is a whole marker.

Rejected: `manifest.json` in place, written last, as torch DCP and Orbax on object stores do: two attempts at one tag
then share a prefix, and a crash while a tag is replaced leaves files of both.  A journal of renames: a reader would
need all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs

from .places import RemainKind, remain, tag_problem

COMMITTED = "committed"
_ASIDE = re.compile(r"aside-([0-9a-f]{16})")
_HOME = re.compile(r"(.+)@([0-9a-f]{16})", re.DOTALL)


@attrs.frozen(order=True)
class Home:
    """The folder of one attempt, under the name that it always has."""

    tag: str
    attempt: str  # 16 hex digits

    @property
    def name(self) -> str:
        return f"{self.tag}@{self.attempt}"


def home(name: str) -> Home | None:
    """The home that has this name in the store; None if it is none."""
    match = _HOME.fullmatch(name)
    return match and Home(match[1], match[2])


def unfinished(name: str) -> Home | None:
    """The home of a save under way, by its name alone: ranks that write into it need look nothing up."""
    found = remain(name)
    return Home(found.tag, found.attempt) if found and found.kind is RemainKind.UNFINISHED else None


def tag_of(name: str) -> str:
    """The tag whose homes may bear this name; "" if none can."""
    found = remain(name)
    if found is not None:
        return found.tag
    return "" if tag_problem(name) else name


def is_marker(name: str) -> bool:
    return name == COMMITTED or _ASIDE.fullmatch(name) is not None


def aside_marker(attempt: str) -> str:
    return f"aside-{attempt}"


def named(homes: Mapping[Home, Iterable[str]]) -> dict[str, Home]:
    """The name that each home has now; `homes` gives the objects in each.

    Of two committed homes of one tag (two jobs that both believed to hold the lock) the greater attempt has the
    name, and the other one counts as moved aside by it: every reader sees the same one.
    """
    names: dict[str, Home] = {}
    for each in sorted(homes):
        markers = set(homes[each])
        asides = sorted(match[1] for match in map(_ASIDE.fullmatch, markers) if match)
        if COMMITTED not in markers:
            names[f".tmp-{each.tag}-{each.attempt}"] = each
        elif asides:
            names[f".old-{each.tag}-{asides[-1]}"] = each
        else:
            if each.tag in names:
                names[f".old-{each.tag}-{each.attempt}"] = names[each.tag]
            names[each.tag] = each
    return names


@attrs.frozen
class Remark:
    """What changes the name of a home: markers to write, then markers to remove."""

    write: tuple[str, ...]
    remove: tuple[str, ...]


def remark(moved: Home, present: Iterable[str], new: str) -> Remark | None:
    """How `moved`, in which the objects `present` lie, gets the name `new`; None if it never can.

    Of the transitions that saves, sweeps and deletions make, each is one write or one removal.
    """
    asides = tuple(sorted(name for name in present if _ASIDE.fullmatch(name)))
    if new == moved.tag:
        return Remark((COMMITTED,), asides) if COMMITTED not in present else Remark((), asides)
    found = remain(new)
    if found is None or found.tag != moved.tag:
        return None
    if found.kind is RemainKind.ASIDE:
        return Remark((aside_marker(found.attempt),), tuple(each for each in asides if found.attempt not in each))
    if found.kind is RemainKind.UNFINISHED and found.attempt == moved.attempt:
        return Remark((), (COMMITTED, *asides))
    return None
