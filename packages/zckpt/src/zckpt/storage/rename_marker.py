"""Folder names on a store without an atomic rename of folders.

Such a store (S3, SFTP, HDFS, ...) has objects only, and renaming a folder copies and deletes them one by one.  So
each attempt to save writes into a folder of its own that never moves, `<tag>@<attempt>/`, and markers (tiny objects
in it) determine the name that the rest of this package sees:

    no `committed`                   .tmp-<tag>-<attempt>     never read
    `committed`                      <tag>                    a checkpoint
    `committed` and `aside-<other>`  .old-<tag>-<other>       moved aside by the attempt <other>

So a rename creates or removes one small object, which is atomic under any crash.  A marker counts by its presence, so
a half-written marker is a whole one.

Rejected: writing `manifest.json` in place, last, as torch DCP and Orbax do on object stores (two attempts at one tag
then share a prefix, and a crash while a tag is replaced leaves files of both); a journal of renames (a reader would
need all of it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import attrs

from zckpt.format.paths import LeftoverKind, parse_leftover, tag_problem

COMMITTED = "committed"
_ASIDE = re.compile(r"aside-([0-9a-f]{16})")
_ATTEMPT_FOLDER = re.compile(r"(.+)@([0-9a-f]{16})", re.DOTALL)


@attrs.frozen(order=True)
class AttemptFolder:
    """The folder of one attempt, by its permanent name in the store."""

    tag: str
    attempt: str  # 16 hex digits

    @property
    def name(self) -> str:
        return f"{self.tag}@{self.attempt}"


def parse_attempt_folder(name: str) -> AttemptFolder | None:
    """The attempt folder of this name in the store; None for any other name."""
    match = _ATTEMPT_FOLDER.fullmatch(name)
    return match and AttemptFolder(match[1], match[2])


def unfinished_folder(name: str) -> AttemptFolder | None:
    """The attempt folder of a running save, from its visible name alone: writing ranks need no look-up."""
    found = parse_leftover(name)
    return AttemptFolder(found.tag, found.attempt) if found and found.kind is LeftoverKind.UNFINISHED else None


def tag_of(name: str) -> str:
    """The tag whose attempt folders may have this visible name; "" if none can."""
    found = parse_leftover(name)
    if found is not None:
        return found.tag
    return "" if tag_problem(name) else name


def is_marker(name: str) -> bool:
    return name == COMMITTED or _ASIDE.fullmatch(name) is not None


def aside_marker(attempt: str) -> str:
    return f"aside-{attempt}"


def visible_names(folders: Mapping[AttemptFolder, Iterable[str]]) -> dict[str, AttemptFolder]:
    """Visible name -> attempt folder; `folders` gives the objects in each.

    Of two committed folders of one tag (two jobs that both believed they held the lock), the greater attempt gets the
    name, and the other counts as moved aside by it: every reader sees the same one.
    """
    names: dict[str, AttemptFolder] = {}
    for each in sorted(folders):
        markers = set(folders[each])
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
class MarkerChange:
    """A rename: markers to write, then markers to remove."""

    write: tuple[str, ...]
    remove: tuple[str, ...]


def plan_rename(moved: AttemptFolder, present: Iterable[str], new: str) -> MarkerChange | None:
    """Markers that rename `moved`, which holds the objects `present`, to `new`; None if impossible.

    Every rename that a save, sweep or deletion makes is one write or one removal.
    """
    asides = tuple(sorted(name for name in present if _ASIDE.fullmatch(name)))
    if new == moved.tag:
        return MarkerChange((COMMITTED,), asides) if COMMITTED not in present else MarkerChange((), asides)
    found = parse_leftover(new)
    if found is None or found.tag != moved.tag:
        return None
    if found.kind is LeftoverKind.ASIDE:
        return MarkerChange(
            (aside_marker(found.attempt),), tuple(each for each in asides if found.attempt not in each)
        )
    if found.kind is LeftoverKind.UNFINISHED and found.attempt == moved.attempt:
        return MarkerChange((), (COMMITTED, *asides))
    return None
