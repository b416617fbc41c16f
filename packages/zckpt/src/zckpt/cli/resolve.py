"""From what was typed to a checkpoint: a root (its newest one, or a tag in it), a checkpoint's folder, or a URL."""

from __future__ import annotations

import sys
from pathlib import Path

from ..checkpoint import Checkpoint
from ..errors import CheckpointInputError, CheckpointNotFound
from ..finding import find
from ..locating import located, located_checkpoint
from ..manifest import FILE_NAME
from ..marking import home
from ..opening import named_os_errors, open_checkpoint
from ..places import remain
from ..storage import LOCAL, Kind, Storage


def resolve(text: str, tag: str | None = None) -> Checkpoint:
    """The one checkpoint that is meant; what was odd about finding it goes to stderr."""
    root, storage = located(text)
    if storage is LOCAL:
        root = _local(root)
    folder, its_storage = (root, LOCAL) if storage is LOCAL else located_checkpoint(text)
    with named_os_errors(f"looking for a checkpoint in {text}"):
        is_one = _has_manifest(folder, its_storage)
    if is_one and tag not in (None, _tag(folder)):
        raise CheckpointInputError(f"{text} is the checkpoint {_tag(folder)!r}: leave out --tag, or give the root")
    if is_one:
        return open_checkpoint(_logical(folder, its_storage), tag=_tag(folder), storage=its_storage)
    if storage is LOCAL and (remain(root.name) is not None or any(root.glob("*.safetensors"))):
        raise CheckpointNotFound(f"{text} has no {FILE_NAME}: never committed")
    found = find(root, tag, storage=storage)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    return found


def existing_root(text: str) -> tuple[Path, Storage]:
    """A root to list or to prune; CheckpointNotFound if a local one is no folder."""
    root, storage = located(text)
    return (_local(root), storage) if storage is LOCAL else (root, storage)


def _local(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} is not a folder")
    return path.resolve()


def _has_manifest(folder: Path, storage: Storage) -> bool:
    return storage.kind(folder / FILE_NAME) is not Kind.ABSENT


def _tag(folder: Path) -> str:
    """What a folder's manifest must say: its name, without what a replacement or a store added to it."""
    aside, at = remain(folder.name), home(folder.name)
    if aside is not None:
        return aside.tag
    return at.tag if at is not None else folder.name


def _logical(folder: Path, storage: Storage) -> Path:
    """A folder in a store may be given by the name that it has there."""
    at = home(folder.name)
    return folder if storage is LOCAL or at is None else folder.with_name(at.tag)
