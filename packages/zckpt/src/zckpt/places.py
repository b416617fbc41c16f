"""Names in a root folder, and what each one means to whoever finds it.

<root>/<tag>/                    a committed checkpoint
<root>/.tmp-<tag>-<attempt>/     a save under way, or what a crash left of one: never read
<root>/.old-<tag>-<attempt>/     a checkpoint moved aside by the attempt that replaces it
<root>/latest                    the tag to resume from: a hint, replaced whole
<root>/.latest-<attempt>         the next `latest`; it counts once <tag> is there, of the same attempt
<root>/.lock                     held by the job that is saving
"""

from __future__ import annotations

import enum
import re
from pathlib import Path

import attrs

from . import manifest
from .errors import CheckpointInputError

LATEST = "latest"
_REMAINS = re.compile(r"\.(?:(tmp|old)-(.+)|latest)-([0-9a-f]{16})", re.DOTALL)


def tag_problem(tag: object) -> str:
    """Why this cannot be a tag; "" if it can."""
    if not isinstance(tag, str) or not tag or len(tag.encode(errors="replace")) > 200:
        return "a tag must be a str of 1 to 200 bytes"
    if tag == LATEST or tag.startswith(".") or "/" in tag or "\\" in tag:
        return 'a tag may not be "latest", begin with a dot, or hold a slash'
    if not tag.isprintable() or tag != tag.strip():
        return "a tag may hold only printable characters, with no space at its ends"
    return ""


def check_tag(tag: object) -> str:
    if trouble := tag_problem(tag):
        raise CheckpointInputError(f"tag {tag!r:.200}: {trouble}")
    return str(tag)


@attrs.frozen
class Place:
    """The paths of one attempt to save one tag."""

    root: Path
    tag: str
    attempt: str  # 16 hex digits

    @property
    def final(self) -> Path:
        return self.root / self.tag

    @property
    def folder(self) -> Path:
        """Where the attempt is written."""
        return self.root / f".tmp-{self.tag}-{self.attempt}"

    @property
    def aside(self) -> Path:
        """Where the checkpoint that it replaces waits."""
        return self.root / f".old-{self.tag}-{self.attempt}"

    @property
    def latest(self) -> Path:
        return self.root / LATEST

    @property
    def new_latest(self) -> Path:
        return self.root / f".latest-{self.attempt}"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def manifest(self) -> Path:
        return self.folder / manifest.FILE_NAME


class RemainKind(enum.Enum):
    """What a crash can leave behind."""

    UNFINISHED = "tmp"  # never committed
    ASIDE = "old"  # committed once; to be put back if nothing has its name
    POINTER = "latest"  # a `latest` that was not put in place; to be, if its attempt was committed


@attrs.frozen
class Remain:
    name: str
    kind: RemainKind
    tag: str  # "" for a pointer
    attempt: str


def remain(name: str) -> Remain | None:
    """What an entry of the root is a remain of; None if it is none of ours."""
    match = _REMAINS.fullmatch(name)
    return match and Remain(name, RemainKind(match[1] or "latest"), match[2] or "", match[3])
