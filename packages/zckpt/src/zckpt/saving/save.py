"""The verb `save`: plan, prepare, write, commit, publish; each stage ends in a vote of all ranks.

commit.py explains durability, ranks.py agreement, plan.py the plan.  After any failure all ranks raise the same
error, the attempt's folder is removed, and every earlier checkpoint is unchanged.

The arguments become a SaveJob, which `run_save` executes; a background save replaces the job's tensors by copies in
between (background.py).
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
from zckpt.gc_pause import collector_paused
from zckpt.ranks import ALONE, Peers, Vote
from zckpt.saving.commit import Coordinator, Participant
from zckpt.saving.plan import FilePlan, SavePlan, SaveRequest, ShardSlice, drop_objects, merge_proposals, propose
from zckpt.saving.prune import prune_after_save
from zckpt.saving.retention import KEEP_ALL, RetentionPolicy
from zckpt.sources.views import Tensors, Views, add_view_objects, shards_of
from zckpt.storage import safetensors_file as safefile
from zckpt.storage.locate import resolve_root
from zckpt.storage.storage import LOCAL, Storage
from zckpt.storage.thread_pool import run_jobs


@collector_paused()
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
    """Save one checkpoint and return its folder, `<root>/<tag>`.  Every rank of `peers` calls it.

    root: a folder that all ranks see, or the URL of a store ("s3://bucket/run"); storage=remote(url, ...) passes
        options to the store.
    tag: the folder's name; default step-<step>.
    shards: the tensors of this rank.  The shards of all ranks together cover each tensor; a region that several ranks
        hold is written by one of them.  The tensors are read in place and must not change before the return.
    tensors: tensors without addresses: whole tensors by name, or `views` of a model and an optimizer.
    objects: JSON values of the run, the same on every rank (or {} on all but rank 0); see `canonical`.
    rank_objects: JSON values of this rank, such as its random state.
    step: orders the checkpoints of a root.
    latest: make `<root>/latest` name this tag.
    overwrite: replace a checkpoint of this tag instead of raising.
    writers: threads, and files, per rank; small checkpoints use fewer.  Each needs a buffer of 8 MiB, and another
        one for tensors on a GPU.
    keep: retention policy; after the save, deletes the checkpoints of this root that it does not keep (prune.py).  A
        failure there is a warning.

    On return the checkpoint survives a power cut.  Raises, the same on every rank: CheckpointInputError (arguments
    cannot be saved, or ranks disagree), CheckpointExists, CheckpointWriteError (disk or peers failed; names the rank
    and the path).

    >>> import tempfile, torch, zckpt
    >>> root, model = tempfile.mkdtemp(), torch.nn.Linear(4, 2)
    >>> zckpt.save(root, tensors=zckpt.views(model), objects={"epoch": 3}, step=100).name
    'step-100'
    """
    request = SaveRequest.of(tag, step, latest=latest, overwrite=overwrite, writers=writers)
    content = SaveContent(shards, tensors, objects, rank_objects)
    return run_save(SaveJob.of(root, request, content, keep, storage), peers)


@attrs.frozen(eq=False)
class SaveContent:
    """The state to save, as passed by the caller."""

    shards: Iterable[ShardLike]
    tensors: Tensors
    objects: Mapping[str, JSON]
    rank_objects: Mapping[str, JSON]


@attrs.frozen(eq=False)
class SaveJob:
    """One rank's save request, before any value is read."""

    root: Path
    request: SaveRequest
    shards: Sequence[ShardLike]  # all of them; those made from `tensors` last
    num_given: int  # number of `shards` that were passed as shards
    tensors: Tensors  # a mapping or views, as passed; else empty
    objects: Mapping[str, JSON]
    rank_objects: Mapping[str, JSON]
    keep: RetentionPolicy
    storage: Storage
    error: Exception | None = None  # raised by the arguments; the planning vote sends it to all ranks

    @classmethod
    def of(
        cls,
        root: str | os.PathLike[str],
        request: SaveRequest,
        content: SaveContent,
        keep: RetentionPolicy,
        storage: Storage,
    ) -> SaveJob:
        """Build the job.  Stores an error instead of raising it: raising now would leave the other ranks waiting."""
        try:
            return cls._of(root, request, content, keep, storage)
        except Exception as error:
            folder = Path(root) if isinstance(root, (str, os.PathLike)) else Path()
            return cls(folder, request, [], 0, {}, {}, {}, keep, storage, error)

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
            objects=add_view_objects(content.objects, tensors),
            rank_objects=content.rank_objects,
            keep=keep,
            storage=storage,
        )

    def vote(self, peers: Peers) -> Vote:
        return Vote(peers, f"save of {self.request.tag!r:.200} into {self.root}", CheckpointWriteError)


def run_save(job: SaveJob, peers: Peers) -> Path:
    """Run the stages of a save; every rank calls it."""
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
    """On the rank where the caller's own code raised (e.g. its generator of shards), raise that error unchanged."""
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
    """Write, hash and sync this rank's files, one thread per file; return the part checksums of each file."""
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
