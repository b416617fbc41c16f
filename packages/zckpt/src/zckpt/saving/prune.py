"""Deleting checkpoints that a policy no longer wants.

Under the root's lock, so never beside a save.  Each one loses its name first, by one atomic rename to
`.tmp-<tag>-<attempt>`, the name of what nobody reads and every later save sweeps; then its files go.  A crash at any
moment leaves whole checkpoints and such remains, never half of one under its tag.  What was interrupted is swept
first, so `latest` and the checkpoints are in their final places when they are judged.

A process that is loading a checkpoint holds no lock: if a checkpoint is deleted under it, its load ends in a
CheckpointReadError, never in wrong values.  The one that `latest` names and the newest are never deleted, and those
are what processes load unasked; keep a few more (`last=3`) where others read older ones.
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterable
from pathlib import Path

import attrs

from zckpt.errors import CheckpointError, CheckpointWarning, CheckpointWriteError, os_error_path, os_error_text
from zckpt.format.paths import LATEST, AttemptPaths
from zckpt.loading.checkpoint import Checkpoint, open_checkpoint
from zckpt.loading.select import list_checkpoints, pending_pointer
from zckpt.saving.commit import remove, sweep
from zckpt.saving.retention import (
    KEEP_ALL,
    Candidate,
    KeepAlso,
    RetentionDecision,
    RetentionPolicy,
    decide,
    metrics_of,
)
from zckpt.storage.locate import resolve_root
from zckpt.storage.storage import LOCAL, Storage, read_all


@attrs.frozen
class PruneReport:
    """Result of `prune`, or its preview."""

    decisions: tuple[RetentionDecision, ...]  # of each complete checkpoint, highest step first
    damaged: tuple[str, ...]  # tags that are left alone, as they are no complete checkpoints; one line each

    @property
    def removed(self) -> tuple[str, ...]:
        return tuple(each.candidate.tag for each in self.decisions if each.is_removed)


def prune(
    root: str | os.PathLike[str], keep: RetentionPolicy, *, storage: Storage = LOCAL, dry_run: bool = False
) -> PruneReport:
    """Delete the checkpoints of a root that `keep` does not want.  One process calls it, no matter which.

    Never deleted: the one that `latest` names, the newest complete one, and what is damaged.
    dry_run: only say what would go; takes no lock and changes nothing.

    Raises CheckpointWriteError: a save into this root is under way, or the disk refuses.
    """
    folder, storage = resolve_root(root, storage)
    try:
        if dry_run:
            return _decisions(folder, keep, storage)[0]
        lock = storage.lock(
            AttemptPaths(folder, "", "").lock, f"pid {os.getpid()} on {socket.gethostname()}, pruning"
        )
        try:
            if lock.is_exclusive:
                sweep(storage, folder)
            pruned, found = _decisions(folder, keep, storage)
            for tag in pruned.removed:
                _delete(found[tag], folder)
            return pruned
        finally:
            lock.release()
    except BlockingIOError as error:
        raise CheckpointWriteError(
            f"{folder}: not pruned, another job is saving into it: {error.strerror}", path=str(folder)
        ) from error
    except OSError as error:
        raise CheckpointWriteError(
            f"{folder}: not pruned: {os_error_text(error)}", path=os_error_path(error)
        ) from error


def prune_after_save(root: Path, keep: RetentionPolicy, saved: str, storage: Storage) -> None:
    """`prune` after the save of the tag `saved` has succeeded, which stays: what goes wrong here is a warning.

    That includes whatever a policy of the caller's raises, since only one of the ranks that saved comes here.
    """
    if keep is KEEP_ALL:
        return
    try:
        prune(root, KeepAlso(keep, saved), storage=storage)
    except Exception as error:
        text = (
            str(error)
            if isinstance(error, CheckpointError)
            else f"{root}: not pruned: {type(error).__name__}: {error}"
        )
        warnings.warn(text, CheckpointWarning, stacklevel=3)


def _decisions(root: Path, keep: RetentionPolicy, storage: Storage) -> tuple[PruneReport, dict[str, Checkpoint]]:
    """The verdicts, and the complete checkpoints by tag."""
    complete: dict[str, Checkpoint] = {}
    damaged = []
    for seen in list_checkpoints(root, storage=storage):
        try:
            complete[seen.tag] = open_checkpoint(seen.path, tag=seen.tag, storage=storage)
        except CheckpointError as error:
            damaged.append(f"{seen.tag}: {error}")
    candidates = [Candidate(each.tag, each.step, metrics_of(each.objects)) for each in complete.values()]
    return PruneReport(tuple(decide(keep, candidates, _latest_tags(storage, root))), tuple(damaged)), complete


def _latest_tags(storage: Storage, root: Path) -> Iterable[str]:
    """Tags that a `latest` names, in its place or on its way there."""
    pending = pending_pointer(storage, root)
    if pending is not None:
        yield pending.tag
    with contextlib.suppress(FileNotFoundError):
        yield read_all(storage, root / LATEST, 4096).decode(errors="replace").strip()


def _delete(checkpoint: Checkpoint, root: Path) -> None:
    nameless = AttemptPaths(root, checkpoint.tag, checkpoint.manifest.attempt).folder
    checkpoint.storage.rename(checkpoint.path, nameless)
    checkpoint.storage.sync_folder(root)
    remove(checkpoint.storage, nameless)
