"""Resolution of a path argument to a checkpoint: a root (its `latest` or a tag), a checkpoint folder, or a URL."""

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
    """Open the checkpoint of a path argument; prints its notes to stderr."""
    root, storage = resolve_root(text)
    found = _resolve_local(_check_folder(root), tag) if storage is LOCAL else _resolve_remote(text, tag)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    return found


def _resolve_local(path: Path, tag: str | None) -> Checkpoint:
    """Open a local path: a folder with a manifest is a checkpoint, a folder without one a root."""
    left = parse_leftover(path.name)
    if left is not None and left.kind is LeftoverKind.UNFINISHED:
        raise CheckpointNotFound(f"{path} is left over from a save or a deletion: never committed, or deleted")
    if (path / FILE_NAME).exists():
        return _open_folder(path, tag, LOCAL)
    if left is not None or any(path.glob("*.safetensors")):
        raise CheckpointNotFound(f"{path} has no {FILE_NAME}: never committed")
    return find(path, tag)


def _resolve_remote(text: str, tag: str | None) -> Checkpoint:
    """Open a URL: as a root first, as credentials may not allow listing the parent; then as a checkpoint."""
    try:
        return find(text, tag)
    except CheckpointNotFound as nothing:
        folder, storage = resolve_checkpoint(text)
        at = parse_attempt_folder(folder.name)  # the URL may hold the native name of the folder
        folder = folder if at is None else folder.with_name(at.tag)
        with contextlib.suppress(OSError):
            if storage.kind(folder / FILE_NAME) is PathKind.FILE:
                return _open_folder(folder, tag, storage)
        raise nothing


def _open_folder(folder: Path, tag: str | None, storage: Storage) -> Checkpoint:
    aside = parse_leftover(folder.name)
    its_tag = folder.name if aside is None else aside.tag
    if tag not in (None, its_tag):
        raise CheckpointInputError(f"{folder} is the checkpoint {its_tag!r}: leave out --tag, or pass the root")
    return open_checkpoint(folder, tag=its_tag, storage=storage)


def existing_root(text: str) -> tuple[Path, Storage]:
    """Resolve a root to list or prune.  Raises CheckpointNotFound if a local root is not a folder."""
    root, storage = resolve_root(text)
    return (_check_folder(root), storage) if storage is LOCAL else (root, storage)


def _check_folder(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} is not a folder")
    return path.resolve()
