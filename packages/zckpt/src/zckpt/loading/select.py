"""Selection of the checkpoint to load.

A checkpoint exists if its folder is named by its tag and holds a manifest whose checksum is right.  `latest` is a
hint for people and for rolling back: it is followed if it names such a folder.  If it is missing, empty, unreadable
or names no checkpoint, the committed checkpoint of the highest step is selected, and a note says so.  A `latest` that
points outside the root has been tampered with and raises.

A damaged checkpoint differs from a missing pointer: if the selected checkpoint contradicts its manifest, the error
names the newest complete one.  Falling back silently would lose work that may still exist on another disk.

Nothing here writes, so any number of ranks may read at once; the next save cleans up (commit.py).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import attrs

from zckpt.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from zckpt.format import manifest as manifests
from zckpt.format.paths import LATEST, LeftoverKind, check_tag, parse_leftover, tag_problem
from zckpt.gc_pause import collector_paused
from zckpt.loading.checkpoint import Checkpoint, as_read_errors, open_checkpoint, read_summary
from zckpt.storage.locate import resolve_root
from zckpt.storage.storage import LOCAL, PathKind, Storage, read_all


@attrs.frozen
class CheckpointInfo:
    """One committed checkpoint of a root; only the checksum of its manifest is checked."""

    step: int
    tag: str
    path: Path


@attrs.frozen
class PendingPointer:
    """A `latest` that was written but not renamed into place."""

    name: str  # of the file
    tag: str  # its content


@collector_paused()
def find(root: str | os.PathLike[str], tag: str | None = None, *, storage: Storage = LOCAL) -> Checkpoint:
    """Open the checkpoint of this tag; without a tag, the one that `latest` names, or else the highest step.

    root: a folder, or the URL of a store.
    Checks the whole manifest and the size of every file; tensors are verified when they are read.  `notes` of the
    result lists irregularities.
    Raises CheckpointNotFound or CheckpointCorrupt (both name the newest complete checkpoint), CheckpointReadError.

    >>> import tempfile, torch, zckpt
    >>> root = tempfile.mkdtemp()
    >>> path = zckpt.save(root, "best", tensors={"w": torch.ones(2)})
    >>> checkpoint = zckpt.find(root)
    >>> checkpoint.tag, checkpoint.names()
    ('best', ('w',))
    """
    folder, storage = resolve_root(root, storage)
    with as_read_errors(f"looking for a checkpoint in {folder}"):
        if tag is not None:
            return _open_tag(storage, folder, check_tag(tag), ())
        pointed, notes = _pointer(storage, folder)
        if pointed is None:
            return _open_newest(storage, folder, notes)
        found = _open_tag(storage, folder, pointed, notes)
        others = _infos(storage, folder, _tags(storage, folder) - {pointed})
        newer = [seen for seen in others if seen.step > found.step]
        if newer:
            found.notes += (
                f"`{LATEST}` names {pointed!r} (step {found.manifest.step}); {newer[0].tag!r} (step {newer[0].step}) "
                f"is newer: load it with tag={newer[0].tag!r}",
            )
        return found


def list_checkpoints(root: str | os.PathLike[str], *, storage: Storage = LOCAL) -> list[CheckpointInfo]:
    """The committed checkpoints of a root, highest step first.

    >>> import tempfile, torch, zckpt
    >>> root = tempfile.mkdtemp()
    >>> paths = [zckpt.save(root, tensors={"w": torch.ones(2)}, step=step) for step in (1, 2)]
    >>> [info.tag for info in zckpt.list_checkpoints(root)]
    ['step-2', 'step-1']
    """
    folder, storage = resolve_root(root, storage)
    return _infos(storage, folder, _tags(storage, folder))


def newest_aside(storage: Storage, root: Path, tag: str) -> Path | None:
    """The checkpoint of this tag that an interrupted replacement moved aside; None if there is none."""
    asides = []
    for name in _names(storage, root):
        found = parse_leftover(name)
        if found is not None and found.kind is LeftoverKind.ASIDE and found.tag == tag:
            with contextlib.suppress(CheckpointError, OSError):
                asides.append((read_summary(storage, root / name).step, name))
    return root / max(asides)[1] if asides else None


def pending_pointer(storage: Storage, root: Path) -> PendingPointer | None:
    """The `latest` of a save that was interrupted between its commit and the update of `latest`."""
    for found in map(parse_leftover, _names(storage, root)):
        if found is not None and found.kind is LeftoverKind.POINTER:
            with contextlib.suppress(CheckpointError, OSError, UnicodeDecodeError):
                tag = check_tag(read_all(storage, root / found.name, 4096).decode().strip())
                if read_summary(storage, root / tag).attempt == found.attempt:
                    return PendingPointer(found.name, tag)
    return None


_NEWEST = "taking the newest committed checkpoint"  # end of a note about `latest`


def _names(storage: Storage, root: Path) -> list[str]:
    """Names in a root that may be absent.  The root may be a link: the caller chose it."""
    try:
        return storage.names(root)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _tags(storage: Storage, root: Path) -> set[str]:
    """Tags that may have a checkpoint, by the names in the root."""
    names = _names(storage, root)
    asides = {found.tag for found in map(parse_leftover, names) if found and found.kind is LeftoverKind.ASIDE}
    return asides | {name for name in names if not tag_problem(name)}


def _infos(storage: Storage, root: Path, tags: set[str]) -> list[CheckpointInfo]:
    seen = [_info(storage, root, tag) for tag in tags]
    return sorted((each for each in seen if each is not None), key=lambda each: (each.step, each.tag), reverse=True)


def _info(storage: Storage, root: Path, tag: str) -> CheckpointInfo | None:
    with contextlib.suppress(CheckpointError, OSError):
        path = _folder_of(storage, root, tag)
        if path is not None:
            summary = read_summary(storage, path)
            return CheckpointInfo(summary.step, tag, path) if summary.tag == tag else None
    return None


def _folder_of(storage: Storage, root: Path, tag: str) -> Path | None:
    """Folder of a tag's checkpoint: under its name, or moved aside."""
    kind = storage.kind(root / tag)
    if kind is PathKind.ABSENT:
        return newest_aside(storage, root, tag)
    if kind is not PathKind.FOLDER:
        raise CheckpointCorrupt(f"{root / tag} is a {kind.value}, not a folder", path=str(root / tag))
    return root / tag


def _pointer(storage: Storage, root: Path) -> tuple[str | None, tuple[str, ...]]:
    """The tag that `latest` names, if it has a checkpoint, and notes."""
    path, newest = root / LATEST, _NEWEST
    pending = pending_pointer(storage, root)
    if pending is not None:
        return pending.tag, (f"{path} is out of date: the save of {pending.tag!r} was interrupted after its commit",)
    kind = storage.kind(path)
    if kind is not PathKind.FILE:
        return None, (f"{path} is {'missing' if kind is PathKind.ABSENT else f'a {kind.value}'}: {newest}",)
    try:
        text = read_all(storage, path, 4096).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        return None, (f"{path} cannot be read ({error}): {newest}",)
    if not text:
        return None, (f"{path} is empty: {newest}",)
    if "/" in text or "\\" in text or text in (".", ".."):
        raise CheckpointCorrupt(
            f"{path} points outside its folder ({text!r:.200}): write a tag into it, or remove it."
            f"{_suggest(storage, root)}",
            path=str(path),
        )
    folder = None if tag_problem(text) else _folder_of(storage, root, text)
    if folder is None or storage.kind(folder / manifests.FILE_NAME) is PathKind.ABSENT:
        return None, (f"{path} names {text!r:.200}, which is no committed checkpoint: {newest}",)
    return text, ()


def _open_tag(storage: Storage, root: Path, tag: str, notes: tuple[str, ...]) -> Checkpoint:
    path = _folder_of(storage, root, tag)
    if path is None:
        raise CheckpointNotFound(f"{root} has no checkpoint {tag!r}.{_suggest(storage, root)}", path=str(root))
    if path.name != tag:
        notes += (f"{root / tag} was being replaced when a save was interrupted: reading {path}",)
    try:
        return open_checkpoint(path, tag=tag, notes=notes, storage=storage)
    except CheckpointError as error:
        raise type(error)(f"{error}.{_suggest(storage, root, tag)}", path=error.path) from None


def _open_newest(storage: Storage, root: Path, notes: tuple[str, ...]) -> Checkpoint:
    for seen in list_checkpoints(root, storage=storage):
        try:
            return open_checkpoint(seen.path, tag=seen.tag, notes=notes, storage=storage)
        except CheckpointError as error:
            notes += (f"skipped {seen.tag!r} (step {seen.step}): {error}",)
    if storage.kind(root) is PathKind.ABSENT:
        raise CheckpointNotFound(
            f"{root} holds no committed checkpoint: it does not exist (pass the folder that was passed to save)",
            path=str(root),
        )
    passed = "".join(f"\n  {note.removesuffix(f': {_NEWEST}')}" for note in notes)
    raise CheckpointNotFound(f"{root} holds no committed checkpoint{passed}", path=str(root))


def _suggest(storage: Storage, root: Path, but: str = "") -> str:
    """A sentence that names the newest complete checkpoint."""
    others = [seen for seen in list_checkpoints(root, storage=storage) if seen.tag != but]
    for seen in others:
        with contextlib.suppress(CheckpointError):
            open_checkpoint(seen.path, tag=seen.tag, storage=storage)
            return f" Newest complete checkpoint: {seen.tag} (step {seen.step}; load it with tag={seen.tag!r})."
    return " There is no other complete checkpoint." if but else " There is no committed checkpoint."
