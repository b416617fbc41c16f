"""Names in a root folder.

<root>/<tag>/                    a committed checkpoint
<root>/.tmp-<tag>-<attempt>/     a save in progress or interrupted: never read
<root>/.old-<tag>-<attempt>/     a checkpoint moved aside by the attempt that replaces it
<root>/latest                    the tag to resume from: a hint, replaced atomically
<root>/.latest-<attempt>         the next `latest`; valid once <tag> exists and is of the same attempt
<root>/.lock                     held by the job that is saving
"""

from __future__ import annotations

import enum
import re
from pathlib import Path

import attrs

from zckpt.errors import CheckpointInputError
from zckpt.format import manifest

LATEST = "latest"
_REMAINS = re.compile(r"\.(?:(tmp|old)-(.+)|latest)-([0-9a-f]{16})", re.DOTALL)


def tag_problem(tag: object) -> str:
    """Error text if this is not a valid tag; "" if it is."""
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
class AttemptPaths:
    """The paths of one attempt to save one tag."""

    root: Path
    tag: str
    attempt: str  # 16 hex digits

    @property
    def final(self) -> Path:
        return self.root / self.tag

    @property
    def folder(self) -> Path:
        """Folder that the attempt writes to."""
        return self.root / f".tmp-{self.tag}-{self.attempt}"

    @property
    def aside(self) -> Path:
        """Folder of the checkpoint that this attempt replaces."""
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


class LeftoverKind(enum.Enum):
    """Kinds of leftovers of an interrupted save."""

    UNFINISHED = "tmp"  # never committed
    ASIDE = "old"  # committed before; restored if its tag has no checkpoint
    POINTER = "latest"  # a `latest` not yet renamed; it is, if its attempt was committed


@attrs.frozen
class Leftover:
    name: str
    kind: LeftoverKind
    tag: str  # "" for a pointer
    attempt: str


def parse_leftover(name: str) -> Leftover | None:
    """The leftover that a name in the root denotes; None for any other name."""
    match = _REMAINS.fullmatch(name)
    return match and Leftover(name, LeftoverKind(match[1] or "latest"), match[2] or "", match[3])
