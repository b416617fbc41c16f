"""Deletion of checkpoints that a retention policy does not keep.

Pruning holds the root's lock, so it never runs during a save.  Each checkpoint first loses its name, by one atomic
rename to `.tmp-<tag>-<attempt>`, which readers ignore and every later save sweeps; then its files are removed.  A
crash at any moment leaves whole checkpoints and such leftovers, never half a checkpoint under its tag.  Leftovers of
crashes are swept first, so `latest` and the checkpoints are in their final places before the policy runs.

A process that loads a checkpoint holds no lock.  If its checkpoint is deleted meanwhile, the load raises
CheckpointReadError and never returns wrong values.  The checkpoint that `latest` names and the newest one, which
processes load by default, are never deleted; keep a few more (`last=3`) if others read older ones.
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

    decisions: tuple[RetentionDecision, ...]  # one per complete checkpoint, highest step first
    damaged: tuple[str, ...]  # "tag: problem" of checkpoints that are not complete; never deleted

    @property
    def removed(self) -> tuple[str, ...]:
        return tuple(each.candidate.tag for each in self.decisions if each.is_removed)


def prune(
    root: str | os.PathLike[str], keep: RetentionPolicy, *, storage: Storage = LOCAL, dry_run: bool = False
) -> PruneReport:
    """Delete the checkpoints of a root that `keep` does not keep.  One process calls it, on any rank.

    The checkpoint that `latest` names, the newest complete one, and damaged ones are never deleted.
    dry_run: report what would be deleted; takes no lock and changes nothing.

    Raises CheckpointWriteError: a save into this root is running, or the disk failed.

    >>> import tempfile, torch, zckpt
    >>> root = tempfile.mkdtemp()
    >>> paths = [zckpt.save(root, tensors={"w": torch.ones(2)}, step=step) for step in (1, 2, 3)]
    >>> report = zckpt.prune(root, zckpt.Retention(last=2))
    >>> [info.tag for info in zckpt.list_checkpoints(root)]
    ['step-3', 'step-2']
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
    """Prune after a successful save, and keep its tag `saved`.  Failures are warnings.

    So are errors that a caller's policy raises: only rank 0 gets here, and raising would make ranks disagree.
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
    """The decisions, and the complete checkpoints by tag."""
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
    """Tags that `latest` names, renamed into place or pending."""
    pending = pending_pointer(storage, root)
    if pending is not None:
        yield pending.tag
    with contextlib.suppress(FileNotFoundError):
        yield read_all(storage, root / LATEST, 4096).decode(errors="replace").strip()


def _delete(checkpoint: Checkpoint, root: Path) -> None:
    hidden = AttemptPaths(root, checkpoint.tag, checkpoint.manifest.attempt).folder
    checkpoint.storage.rename(checkpoint.path, hidden)
    checkpoint.storage.sync_folder(root)
    remove(checkpoint.storage, hidden)
