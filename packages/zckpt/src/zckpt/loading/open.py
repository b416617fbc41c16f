"""Open one checkpoint folder: read and check the manifest, compare the sizes of its files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from zckpt.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointReadError, os_error_path, os_error_text
from zckpt.format import manifest as manifests
from zckpt.format import schema
from zckpt.format.manifest import Manifest
from zckpt.format.schema import ManifestSummary
from zckpt.loading.checkpoint import Checkpoint
from zckpt.loading.verify import other_save_hint
from zckpt.storage.locate import resolve_checkpoint
from zckpt.storage.storage import LOCAL, PathKind, Storage, read_all


def open_checkpoint(
    path: str | os.PathLike[str], *, tag: str = "", notes: tuple[str, ...] = (), storage: Storage = LOCAL
) -> Checkpoint:
    """The checkpoint in this very folder, which `tag` (by default the folder's name) must match."""
    folder, storage = resolve_checkpoint(path, storage)
    with named_os_errors(f"opening checkpoint {folder}"):
        found = _read_manifest(storage, folder)
        expected = tag or os.path.basename(os.path.abspath(folder))  # of "." too
        if found.tag != expected:
            raise CheckpointCorrupt(
                f"{folder}: its manifest says tag {found.tag!r}, expected {expected!r}: renamed or copied",
                path=str(folder),
            )
        _check_sizes(storage, folder, found)
        return Checkpoint(folder, found, storage, notes)


@contextlib.contextmanager
def named_os_errors(task: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointReadError(f"{task}: {os_error_text(error)}", path=os_error_path(error)) from error


def read_summary(storage: Storage, folder: Path) -> ManifestSummary:
    """Summary of the manifest in this folder; only its checksum is checked."""
    path = folder / manifests.FILE_NAME
    return schema.read_summary(read_all(storage, path, manifests.MAX_NBYTES), path)


def _read_manifest(storage: Storage, folder: Path) -> Manifest:
    path = folder / manifests.FILE_NAME
    kind = storage.kind(path)
    if kind is PathKind.ABSENT:
        state = "never committed" if storage.kind(folder) is PathKind.FOLDER else "not there"
        raise CheckpointNotFound(f"{folder} has no {manifests.FILE_NAME}: {state}", path=str(path))
    if kind is not PathKind.FILE:
        raise CheckpointCorrupt(f"{path} is a {kind.value}, not a plain file: refused", path=str(path))
    return schema.decode(read_all(storage, path, manifests.MAX_NBYTES), path)


def _check_sizes(storage: Storage, folder: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        path = folder / name
        kind = storage.kind(path)
        if kind is not PathKind.FILE:
            what = "is missing" if kind is PathKind.ABSENT else f"is a {kind.value}, not a plain file"
            raise CheckpointCorrupt(f"checkpoint {folder}: {name} {what}", path=str(path))
        found = storage.nbytes(path)
        if found != entry.nbytes:
            why = "truncated" if found < entry.nbytes else "longer than what was saved"
            raise CheckpointCorrupt(
                f"checkpoint {folder}: {name} is {found:,} bytes, the manifest says {entry.nbytes:,}: {why}"
                f"{other_save_hint(storage, path, manifest)}",
                path=str(path),
            )
