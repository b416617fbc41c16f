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

from .checkpoint import Checkpoint
from .commit import remove, sweep
from .errors import CheckpointError, CheckpointWarning, CheckpointWriteError
from .finding import committed, pending_pointer
from .locating import located
from .opening import open_checkpoint
from .places import LATEST, Place
from .retention import EVERYTHING, Besides, Candidate, Keep, Verdict, judge, metrics_of
from .storage import LOCAL, Storage, read_all
from .team import os_error_path, os_error_text


@attrs.frozen
class Pruned:
    """What `prune` did, or would do."""

    verdicts: tuple[Verdict, ...]  # of each complete checkpoint, highest step first
    damaged: tuple[str, ...]  # tags that are left alone, as they are no complete checkpoints; one line each

    @property
    def removed(self) -> tuple[str, ...]:
        return tuple(each.candidate.tag for each in self.verdicts if each.goes)


def prune(root: str | os.PathLike[str], keep: Keep, *, storage: Storage = LOCAL, dry_run: bool = False) -> Pruned:
    """Delete the checkpoints of a root that `keep` does not want.  One process calls it, no matter which.

    Never deleted: the one that `latest` names, the newest complete one, and what is damaged.
    dry_run: only say what would go; takes no lock and changes nothing.

    Raises CheckpointWriteError: a save into this root is under way, or the disk refuses.
    """
    folder, storage = located(root, storage)
    try:
        if dry_run:
            return _judged(folder, keep, storage)[0]
        lock = storage.lock(Place(folder, "", "").lock, f"pid {os.getpid()} on {socket.gethostname()}, pruning")
        try:
            if lock.is_exclusive:
                sweep(storage, folder)
            pruned, found = _judged(folder, keep, storage)
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


def tidy(root: Path, keep: Keep, saved: str, storage: Storage) -> None:
    """`prune` after the save of the tag `saved` has succeeded, which stays: what goes wrong here is a warning.

    That includes whatever a policy of the caller's raises, since only one of the ranks that saved comes here.
    """
    if keep is EVERYTHING:
        return
    try:
        prune(root, Besides(keep, saved), storage=storage)
    except Exception as error:
        told = (
            str(error)
            if isinstance(error, CheckpointError)
            else f"{root}: not pruned: {type(error).__name__}: {error}"
        )
        warnings.warn(told, CheckpointWarning, stacklevel=3)


def _judged(root: Path, keep: Keep, storage: Storage) -> tuple[Pruned, dict[str, Checkpoint]]:
    """The verdicts, and the complete checkpoints by tag."""
    complete: dict[str, Checkpoint] = {}
    damaged = []
    for seen in committed(root, storage=storage):
        try:
            complete[seen.tag] = open_checkpoint(seen.path, tag=seen.tag, storage=storage)
        except CheckpointError as error:
            damaged.append(f"{seen.tag}: {error}")
    candidates = [Candidate(each.tag, each.step, metrics_of(each.objects)) for each in complete.values()]
    return Pruned(tuple(judge(keep, candidates, _pointed(storage, root))), tuple(damaged)), complete


def _pointed(storage: Storage, root: Path) -> Iterable[str]:
    """Tags that a `latest` names, in its place or on its way there."""
    pending = pending_pointer(storage, root)
    if pending is not None:
        yield pending.tag
    with contextlib.suppress(FileNotFoundError):
        yield read_all(storage, root / LATEST, 4096).decode(errors="replace").strip()


def _delete(checkpoint: Checkpoint, root: Path) -> None:
    nameless = Place(root, checkpoint.tag, checkpoint.manifest.attempt).folder
    checkpoint.storage.rename(checkpoint.path, nameless)
    checkpoint.storage.sync_folder(root)
    remove(checkpoint.storage, nameless)
