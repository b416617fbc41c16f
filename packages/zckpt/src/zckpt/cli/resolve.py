"""Resolve a path argument to a checkpoint: a root (its `latest` or a tag), a checkpoint folder, or a URL."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from zckpt.errors import CheckpointInputError, CheckpointNotFound
from zckpt.format.manifest import FILE_NAME
from zckpt.format.paths import LeftoverKind, parse_leftover
from zckpt.loading.checkpoint import Checkpoint, open_checkpoint
from zckpt.loading.select import find
from zckpt.storage.locate import resolve_checkpoint, resolve_root
from zckpt.storage.rename_marker import parse_attempt_folder
from zckpt.storage.storage import LOCAL, PathKind, Storage


def resolve(text: str, tag: str | None = None) -> Checkpoint:
    """The one checkpoint that is meant; what was odd about finding it goes to stderr."""
    root, storage = resolve_root(text)
    found = _local_one(_local(root), tag) if storage is LOCAL else _stored_one(text, tag)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    return found


def _local_one(path: Path, tag: str | None) -> Checkpoint:
    """A folder with a manifest is a checkpoint, a folder without one a root."""
    left = parse_leftover(path.name)
    if left is not None and left.kind is LeftoverKind.UNFINISHED:
        raise CheckpointNotFound(f"{path} is what a save or a deletion left: never committed, or no longer")
    if (path / FILE_NAME).exists():
        return _opened(path, tag, LOCAL)
    if left is not None or any(path.glob("*.safetensors")):
        raise CheckpointNotFound(f"{path} has no {FILE_NAME}: never committed")
    return find(path, tag)


def _stored_one(text: str, tag: str | None) -> Checkpoint:
    """A root if there is something in it: who may read a root may not be allowed to list the level above."""
    try:
        return find(text, tag)
    except CheckpointNotFound as nothing:
        folder, storage = resolve_checkpoint(text)
        at = parse_attempt_folder(folder.name)  # it may be given by the name that it has in the store
        folder = folder if at is None else folder.with_name(at.tag)
        with contextlib.suppress(OSError):
            if storage.kind(folder / FILE_NAME) is PathKind.FILE:
                return _opened(folder, tag, storage)
        raise nothing


def _opened(folder: Path, tag: str | None, storage: Storage) -> Checkpoint:
    aside = parse_leftover(folder.name)
    its_tag = folder.name if aside is None else aside.tag
    if tag not in (None, its_tag):
        raise CheckpointInputError(f"{folder} is the checkpoint {its_tag!r}: leave out --tag, or give the root")
    return open_checkpoint(folder, tag=its_tag, storage=storage)


def existing_root(text: str) -> tuple[Path, Storage]:
    """A root to list or to prune; CheckpointNotFound if a local one is no folder."""
    root, storage = resolve_root(text)
    return (_local(root), storage) if storage is LOCAL else (root, storage)


def _local(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} is not a folder")
    return path.resolve()
