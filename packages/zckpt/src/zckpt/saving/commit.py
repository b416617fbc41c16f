"""Commit protocol: the steps of rank 0 before and after the writing; save.py is the outline.

Only three things survive a crash: the names in the root folder, the names in the checkpoint's folder, and the synced
bytes of files.

    prepare  lock the root; sweep leftovers of crashes; raise if the tag exists; make .tmp-<tag>-<attempt>
    (write)  every rank writes and syncs its files, then syncs the folder
    commit   write and sync the manifest, sync the folder: it is complete and durable, under a name that readers
             ignore.  Write and sync .latest-<attempt>.  Rename the folder to <tag> and sync the root: the commit
    publish  rename .latest-<attempt> to `latest`, sync the root

A crash between commit and publish leaves .latest-<attempt> beside a checkpoint of that attempt.  Readers follow it,
and the next save finishes the rename, so a run resumes from the checkpoint it saved last.

Replacing a tag takes two renames, as POSIX cannot swap folders: the old folder becomes .old-<tag>-<attempt>, then the
new one takes the name.  A crash between the two leaves the old checkpoint complete under its other name, which
readers check (zckpt/loading/select.py) and the next save renames back.  No sync is needed between the two: whichever
of them a power cut leaves, a whole checkpoint has a name that readers check.

A failed commit raises; a failed cleanup warns, since a file that cannot be removed must not stop the saves of a run.
"""

from __future__ import annotations

import enum
import errno
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import final

import attrs

from zckpt.errors import (
    CheckpointExists,
    CheckpointInputError,
    CheckpointWarning,
    CheckpointWriteError,
    os_error_text,
)
from zckpt.format import manifest as manifests
from zckpt.format import schema
from zckpt.format.canonical import JSON
from zckpt.format.chunks import chunk_nbytes
from zckpt.format.manifest import FileEntry, Manifest, Piece, TensorEntry
from zckpt.format.paths import LATEST, AttemptPaths, LeftoverKind, parse_leftover
from zckpt.loading.select import newest_aside, pending_pointer
from zckpt.saving.plan import SavePlan
from zckpt.storage.storage import Lock, PathKind, Storage


class Phase(enum.Enum):
    """Progress of rank 0; determines what `__exit__` undoes."""

    OPEN = "open"  # no folder of this attempt has a name that readers check
    COMMITTED = "committed"  # <tag> is of this attempt and durable


class Participant:
    """Role of every rank except rank 0: no commit steps.  Base class of `Coordinator`."""

    def __enter__(self) -> Participant:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        pass

    def prepare(self) -> JSON:
        return None

    def commit(self, reports: Sequence[JSON]) -> JSON:
        return None

    def publish(self) -> JSON:
        return None


@final
@attrs.define(eq=False)
class Coordinator(Participant):
    """Role of rank 0 in one attempt."""

    place: AttemptPaths
    plan: SavePlan
    storage: Storage
    libraries: dict[str, str]
    owner: str  # description of this job, shown to a job that finds the root locked
    lock: Lock | None = None  # held from prepare to the end of the with block
    phase: Phase = Phase.OPEN

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            if kind is not None and self.phase is Phase.OPEN and self.lock is not None:
                self._undo()
        finally:
            if self.lock is not None:
                self.lock.release()

    def prepare(self) -> JSON:
        make_root(self.storage, self.place.root)
        self.lock = self._acquire_lock()
        if self.lock.is_exclusive:
            sweep(self.storage, self.place.root)
        self._check_tag_is_free()
        self._check_space()
        self.storage.make_folder(self.place.folder)
        return None

    def commit(self, reports: Sequence[JSON]) -> JSON:
        manifest = build_manifest(self.plan, reports, self.libraries)
        schema.check(manifest, self.place.manifest)
        data = manifests.encode(manifest)
        if len(data) > manifests.MAX_NBYTES:
            raise CheckpointInputError(
                f"the manifest is {len(data):,} bytes, readers accept at most {manifests.MAX_NBYTES:,}: pass large "
                "objects as tensors"
            )
        write_file(self.storage, self.place.manifest, data)
        self.storage.sync_folder(self.place.folder)
        if self.plan.request.latest:
            write_file(self.storage, self.place.new_latest, f"{self.place.tag}\n".encode())
        if self.storage.kind(self.place.final) is not PathKind.ABSENT:
            self.storage.rename(self.place.final, self.place.aside)
        self.storage.rename(self.place.folder, self.place.final)
        self.storage.sync_folder(self.place.root)
        self.phase = Phase.COMMITTED
        return None

    def publish(self) -> JSON:
        if self.plan.request.latest:
            try:
                self.storage.rename(self.place.new_latest, self.place.latest)
                self.storage.sync_folder(self.place.root)
            except OSError as error:
                raise CheckpointWriteError(
                    f"{self.place.final} is committed, but updating `latest` failed: {os_error_text(error)}. "
                    f"Load it with tag={self.place.tag!r}.",
                    path=str(self.place.latest),
                ) from error
        if self.storage.kind(self.place.aside) is not PathKind.ABSENT:
            remove(self.storage, self.place.aside)
        return None

    def _acquire_lock(self) -> Lock:
        try:
            return self.storage.lock(self.place.lock, self.owner)
        except BlockingIOError as error:
            raise CheckpointWriteError(
                f"another job is saving into {self.place.root}: {error.strerror}. Use one root per job, or wait for "
                "that job to end.",
                path=str(self.place.lock),
            ) from error

    def _check_tag_is_free(self) -> None:
        final = self.place.final
        if self.storage.kind(final) is PathKind.ABSENT:
            return
        if self.plan.request.overwrite == "refuse":
            raise CheckpointExists(
                f"{final} exists: choose another tag, or replace it with overwrite=True", path=str(final)
            )
        if self.storage.kind(final / manifests.FILE_NAME) is not PathKind.FILE:
            raise CheckpointExists(
                f"{final} exists and is not a checkpoint (it has no {manifests.FILE_NAME}), so it is not replaced: "
                "choose another tag",
                path=str(final),
            )

    def _check_space(self) -> None:
        free = self.storage.free_bytes(self.place.root)
        if free < self.plan.nbytes:
            raise CheckpointWriteError(
                f"{self.place.root}: {os_error_text(OSError(errno.ENOSPC, 'no space'))}: the checkpoint needs "
                f"{self.plan.nbytes:,} bytes, {free:,} are free. Nothing was written.",
                path=str(self.place.root),
            )

    def _undo(self) -> None:
        """Restore the state before the attempt, as far as the disk allows; the next sweep does the rest."""
        try:
            moved_aside = self.storage.kind(self.place.aside) is not PathKind.ABSENT
            if moved_aside and self.storage.kind(self.place.final) is PathKind.ABSENT:
                self.storage.rename(self.place.aside, self.place.final)
            for path in (self.place.new_latest, self.place.folder):
                if self.storage.kind(path) is not PathKind.ABSENT:
                    remove(self.storage, path)
        except OSError as error:
            warnings.warn(f"cleanup of a failed save: {os_error_text(error)}", CheckpointWarning, stacklevel=2)


def make_root(storage: Storage, root: Path) -> None:
    """Make the root and its missing parents, and sync the name of each."""
    missing = []
    while storage.kind(root) is PathKind.ABSENT and root != root.parent:
        missing.append(root)
        root = root.parent
    for folder in reversed(missing):
        storage.make_folder(folder)
        storage.sync_folder(folder.parent)


def write_file(storage: Storage, path: Path, data: bytes) -> None:
    with storage.create(path) as writer:
        writer.write(memoryview(data))
        writer.sync()


def remove(storage: Storage, path: Path) -> None:
    """Remove a file, or a folder with its content, the manifest first; a failure is a warning."""
    try:
        _remove(storage, path)
    except OSError as error:
        warnings.warn(f"could not remove {path}: {os_error_text(error)}", CheckpointWarning, stacklevel=2)


def _remove(storage: Storage, path: Path) -> None:
    if storage.kind(path) is PathKind.FOLDER:
        for name in sorted(storage.names(path), key=lambda name: name != manifests.FILE_NAME):
            _remove(storage, path / name)
    storage.remove(path)


def sweep(storage: Storage, root: Path) -> None:
    """Finish or remove the leftovers of crashed attempts: rename a checkpoint moved aside back, and set `latest`.

    Call it only under the root's lock: then no attempt is running, and every leftover is dead.
    """
    found = [each for each in map(parse_leftover, storage.names(root)) if each is not None]
    if not found:
        return
    storage.sync_folder(root)  # a name seen here may be in memory only; sync it before removing what it replaces
    for tag in sorted({each.tag for each in found if each.kind is LeftoverKind.ASIDE}):
        aside = newest_aside(storage, root, tag)
        if aside is not None and storage.kind(root / tag) is PathKind.ABSENT:
            storage.rename(aside, root / tag)
    pending = pending_pointer(storage, root)
    if pending is not None:
        storage.rename(root / pending.name, root / LATEST)
    for each in found:
        if storage.kind(root / each.name) is not PathKind.ABSENT:
            remove(storage, root / each.name)


def build_manifest(plan: SavePlan, reports: Sequence[JSON], libraries: dict[str, str]) -> Manifest:
    """Build the manifest from a plan and the ranks' reports (for each of their files, the checksums of its parts)."""
    pieces: dict[str, list[Piece]] = {name: [] for name in plan.tensors}
    files = {}
    for rank, report in enumerate(reports):
        for file, checksums in zip(plan.files_of(rank), report, strict=True):
            layout = file.layout
            files[file.name] = FileEntry(layout.nbytes, len(layout.header), manifests.checksum(layout.header))
            for part, key, offset, digest in zip(layout.parts, layout.keys, layout.offsets, checksums, strict=True):
                size = part.nbytes
                pieces[part.name].append(Piece(file.name, key, part.region, offset, size, chunk_nbytes(size), digest))
    return Manifest(
        tag=plan.request.tag,
        step=plan.request.step,
        attempt=plan.attempt,
        world_size=len(plan.rank_objects),
        tensors={
            name: TensorEntry(dtype, shape, _in_order(pieces[name])) for name, (dtype, shape) in plan.tensors.items()
        },
        files=files,
        objects=plan.objects,
        rank_objects=plan.rank_objects,
        libraries=libraries,
    )


def _in_order(pieces: list[Piece]) -> tuple[Piece, ...]:
    return tuple(sorted(pieces, key=lambda each: (each.region.box, each.region.span)) if len(pieces) > 1 else pieces)
