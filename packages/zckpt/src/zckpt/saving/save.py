"""The verb `save`: plan, prepare, write, commit, publish, each stage ended by a vote of all ranks.

Durability is argued in commit.py, agreement in vote.py, the plan in plan.py.  After any failure all ranks raise
the same error, the attempt's folder is gone, and every earlier checkpoint is as it was.

What is given is taken down as an Order first, and `carry_out` does the rest: between the two a background save puts
copies in the place of the tensors (background.py).
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
from torch import Tensor

from zckpt.errors import CheckpointError, CheckpointWriteError, os_error_text
from zckpt.format.canonical import JSON
from zckpt.format.manifest import library_versions
from zckpt.format.paths import AttemptPaths
from zckpt.format.shard import ShardLike
from zckpt.ranks import ALONE, Peers, Vote
from zckpt.saving.commit import Coordinator, Participant
from zckpt.saving.plan import FilePlan, SavePlan, SaveRequest, ShardSlice, drop_objects, merge_proposals, propose
from zckpt.saving.prune import prune_after_save
from zckpt.saving.retention import KEEP_ALL, RetentionPolicy
from zckpt.sources.views import Tensors, Views, shards_of, with_views
from zckpt.storage import safetensors_file as safefile
from zckpt.storage.locate import resolve_root
from zckpt.storage.storage import LOCAL, Storage
from zckpt.storage.thread_pool import run_jobs


def save(
    root: str | os.PathLike[str],
    tag: str | None = None,
    *,
    shards: Iterable[ShardLike] = (),
    tensors: Tensors = (),
    objects: Mapping[str, JSON] = {},
    rank_objects: Mapping[str, JSON] = {},
    peers: Peers = ALONE,
    step: int = 0,
    latest: bool = True,
    overwrite: bool = False,
    writers: int = 2,
    keep: RetentionPolicy = KEEP_ALL,
    storage: Storage = LOCAL,
) -> Path:
    """Save one checkpoint; returns its folder, `<root>/<tag>`.  Every rank of `peers` calls it alike.

    root: a folder that all ranks see, or the URL of a store ("s3://bucket/run"); `remote(url, ...)` as storage gives
        it options.
    tag: the folder's name; step-<step> if it is not given.
    shards: what this rank holds.  All ranks' shards together make each tensor whole; a region that several ranks
        give is written by one of them.  The tensors are read in place and must not change before the return.
    tensors: more of them that need no address: whole tensors by name, or `views` of a model and an optimizer.
    objects: JSON values of the run, the same on every rank (or {} on all but rank 0); see `canonical`.
    rank_objects: JSON values of this rank, such as its random state.
    step: orders the checkpoints of a root.
    latest: make `<root>/latest` name this tag.
    overwrite: replace a checkpoint of this tag instead of refusing.
    writers: threads, and files, of each rank; small checkpoints use fewer.  Each needs a buffer of 8 MiB, and another
        one for tensors on a GPU.
    keep: after the save, delete the checkpoints of this root that the policy does not want (prune.py); what goes
        wrong there is a warning.

    On return the checkpoint survives a power cut.  Raises, on every rank alike: CheckpointInputError (what was given
    cannot be saved, or ranks disagree), CheckpointExists, CheckpointWriteError (disk or peers failed; names the rank
    and the path).
    """
    request = SaveRequest.of(tag, step, latest=latest, overwrite=overwrite, writers=writers)
    content = SaveContent(shards, tensors, objects, rank_objects)
    return run_save(SaveJob.of(root, request, content, keep, storage), peers)


@attrs.frozen(eq=False)
class SaveContent:
    """The state to save, as given."""

    shards: Iterable[ShardLike]
    tensors: Tensors
    objects: Mapping[str, JSON]
    rank_objects: Mapping[str, JSON]


@attrs.frozen(eq=False)
class SaveJob:
    """One rank's save request, before any value is read."""

    root: Path
    request: SaveRequest
    shards: Sequence[ShardLike]  # all, those of `tensors` last
    num_given: int  # how many of them came as shards
    tensors: Tensors  # a mapping or views, as given; else nothing
    objects: Mapping[str, JSON]
    rank_objects: Mapping[str, JSON]
    keep: RetentionPolicy
    storage: Storage
    error: Exception | None = None  # why there is nothing to save; told to all ranks

    @classmethod
    def of(
        cls,
        root: str | os.PathLike[str],
        request: SaveRequest,
        content: SaveContent,
        keep: RetentionPolicy,
        storage: Storage,
    ) -> SaveJob:
        """Raises nothing: a rank that went away now would leave the others waiting."""
        try:
            return cls._of(root, request, content, keep, storage)
        except Exception as error:
            return cls(Path(root), request, [], 0, {}, {}, {}, keep, storage, error)

    @classmethod
    def _of(
        cls,
        root: str | os.PathLike[str],
        request: SaveRequest,
        content: SaveContent,
        keep: RetentionPolicy,
        storage: Storage,
    ) -> SaveJob:
        folder, storage = resolve_root(root, storage)
        shards, tensors = list(content.shards), content.tensors
        if not isinstance(tensors, (Mapping, Views)):
            shards, tensors = [*shards, *tensors], {}
        return cls(
            root=folder,
            request=request,
            shards=[*shards, *shards_of(tensors)],
            num_given=len(shards),
            tensors=tensors,
            objects=with_views(content.objects, tensors),
            rank_objects=content.rank_objects,
            keep=keep,
            storage=storage,
        )

    def vote(self, peers: Peers) -> Vote:
        return Vote(peers, f"save of {self.request.tag!r:.200} into {self.root}", CheckpointWriteError)


def run_save(job: SaveJob, peers: Peers) -> Path:
    """The stages of a save, on every rank alike."""
    vote = job.vote(peers)

    def proposal() -> JSON:
        if job.error is not None:
            raise job.error
        own = propose(job.request, secrets.token_hex(8), job.shards, job.objects, job.rank_objects)
        return drop_objects(own, peers.rank)

    plan = merge_proposals(_with_own_error(job, lambda: vote.run("planning", proposal)))
    place, storage = AttemptPaths(job.root, plan.request.tag, plan.attempt), job.storage
    with _make_coordinator(place, plan, peers, storage) as coordinator:
        vote.run("preparing", coordinator.prepare)
        reports = vote.run("writing", lambda: write_rank(place, plan, job.shards, peers.rank, storage))
        vote.run("committing", lambda: coordinator.commit(reports))
        vote.run("publishing", coordinator.publish)
    if peers.rank == 0:
        prune_after_save(job.root, job.keep, place.tag, storage)
    return place.final


def _with_own_error(job: SaveJob, work: Callable[[], list[JSON]]) -> list[JSON]:
    """An error of the caller's own code, such as its generator of shards, goes on as itself where it was raised."""
    try:
        return work()
    except CheckpointError:
        if job.error is None or isinstance(job.error, CheckpointError):
            raise
        raise job.error from None


def _make_coordinator(place: AttemptPaths, plan: SavePlan, peers: Peers, storage: Storage) -> Participant:
    if peers.rank != 0:
        return Participant()
    owner = f"pid {os.getpid()} on {socket.gethostname()}, tag {place.tag!r}, attempt {place.attempt}"
    return Coordinator(place, plan, storage, library_versions(), owner)


def write_rank(
    place: AttemptPaths, plan: SavePlan, shards: Sequence[ShardLike], rank: int, storage: Storage
) -> list[list[str]]:
    """Write, hash and sync this rank's files, a thread each; returns the checksums of the parts of each."""
    files = plan.files_of(rank)
    jobs = [partial(_write_file, place, file, shards, storage) for file in files]
    written = run_jobs(jobs, len(jobs))
    if files:
        storage.sync_folder(place.folder)
    return written


def _write_file(place: AttemptPaths, file: FilePlan, shards: Sequence[ShardLike], storage: Storage) -> list[str]:
    path = place.folder / file.name
    try:
        with storage.create(path) as writer:
            return safefile.write(writer, file.layout, (_values(shards, each) for each in file.sources))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointWriteError(
            f"{os_error_text(error)}: the file needs {file.layout.nbytes:,} bytes, "
            f"{storage.free_bytes(place.root):,} are free",
            path=str(path),
        ) from error


def _values(shards: Sequence[ShardLike], source: ShardSlice) -> Tensor:
    tensor = shards[source.index].tensor
    return tensor if tensor.numel() == source.stop - source.start else tensor[source.start : source.stop]
