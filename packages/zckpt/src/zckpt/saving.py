"""The verb `save`: plan, prepare, write, commit, publish, each stage ended by a vote of all ranks.

Durability is argued in commit.py, agreement in team.py, the plan in planning.py.  After any failure all ranks raise
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

from . import safefile
from .canonical import JSON
from .commit import Bystander, Keeper
from .crew import work_through
from .errors import CheckpointError, CheckpointWriteError
from .locating import located
from .manifest import library_versions
from .peers import ALONE, Peers
from .places import Place
from .planning import FilePlan, Request, SavePlan, Slice, propose, settle, trim
from .pruning import tidy
from .retention import EVERYTHING, Keep
from .shard import ShardLike
from .storage import LOCAL, Storage
from .team import Team, os_error_text
from .views import Tensors, Views, described, shards_of


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
    keep: Keep = EVERYTHING,
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
    keep: after the save, delete the checkpoints of this root that the policy does not want (pruning.py); what goes
        wrong there is a warning.

    On return the checkpoint survives a power cut.  Raises, on every rank alike: CheckpointInputError (what was given
    cannot be saved, or ranks disagree), CheckpointExists, CheckpointWriteError (disk or peers failed; names the rank
    and the path).
    """
    request = Request.of(tag, step, latest=latest, overwrite=overwrite, writers=writers)
    content = Content(shards, tensors, objects, rank_objects)
    return carry_out(Order.of(root, request, content, keep, storage), peers)


@attrs.frozen(eq=False)
class Content:
    """What there is to save, as it was given."""

    shards: Iterable[ShardLike]
    tensors: Tensors
    objects: Mapping[str, JSON]
    rank_objects: Mapping[str, JSON]


@attrs.frozen(eq=False)
class Order:
    """What one rank was told to save, with no value looked at yet."""

    root: Path
    request: Request
    shards: Sequence[ShardLike]  # all, those of `tensors` last
    num_given: int  # how many of them came as shards
    tensors: Tensors  # a mapping or views, as given; else nothing
    objects: Mapping[str, JSON]
    rank_objects: Mapping[str, JSON]
    keep: Keep
    storage: Storage
    trouble: Exception | None = None  # why there is nothing to save; told to all ranks

    @classmethod
    def of(
        cls, root: str | os.PathLike[str], request: Request, content: Content, keep: Keep, storage: Storage
    ) -> Order:
        """Raises nothing: a rank that went away now would leave the others waiting."""
        try:
            return cls._of(root, request, content, keep, storage)
        except Exception as error:
            return cls(Path(root), request, [], 0, {}, {}, {}, keep, storage, error)

    @classmethod
    def _of(
        cls, root: str | os.PathLike[str], request: Request, content: Content, keep: Keep, storage: Storage
    ) -> Order:
        folder, storage = located(root, storage)
        shards, tensors = list(content.shards), content.tensors
        if not isinstance(tensors, (Mapping, Views)):
            shards, tensors = [*shards, *tensors], {}
        return cls(
            root=folder,
            request=request,
            shards=[*shards, *shards_of(tensors)],
            num_given=len(shards),
            tensors=tensors,
            objects=described(content.objects, tensors),
            rank_objects=content.rank_objects,
            keep=keep,
            storage=storage,
        )

    def team(self, peers: Peers) -> Team:
        return Team(peers, f"save of {self.request.tag!r:.200} into {self.root}", CheckpointWriteError)


def carry_out(order: Order, peers: Peers) -> Path:
    """The stages of a save, on every rank alike."""
    team = order.team(peers)

    def proposal() -> JSON:
        if order.trouble is not None:
            raise order.trouble
        told = propose(order.request, secrets.token_hex(8), order.shards, order.objects, order.rank_objects)
        return trim(told, peers.rank)

    plan = settle(_with_own_error(order, lambda: team.together("planning", proposal)))
    place, storage = Place(order.root, plan.request.tag, plan.attempt), order.storage
    with _keeper(place, plan, peers, storage) as keeper:
        team.together("preparing", keeper.prepare)
        reports = team.together("writing", lambda: write_rank(place, plan, order.shards, peers.rank, storage))
        team.together("committing", lambda: keeper.commit(reports))
        team.together("publishing", keeper.publish)
    if peers.rank == 0:
        tidy(order.root, order.keep, place.tag, storage)
    return place.final


def _with_own_error(order: Order, work: Callable[[], list[JSON]]) -> list[JSON]:
    """An error of the caller's own code, such as its generator of shards, goes on as itself where it was raised."""
    try:
        return work()
    except CheckpointError:
        if order.trouble is None or isinstance(order.trouble, CheckpointError):
            raise
        raise order.trouble from None


def _keeper(place: Place, plan: SavePlan, peers: Peers, storage: Storage) -> Bystander:
    if peers.rank != 0:
        return Bystander()
    from . import __version__  # not at the top: the package imports this module

    owner = f"pid {os.getpid()} on {socket.gethostname()}, tag {place.tag!r}, attempt {place.attempt}"
    return Keeper(place, plan, storage, library_versions(__version__), owner)


def write_rank(
    place: Place, plan: SavePlan, shards: Sequence[ShardLike], rank: int, storage: Storage
) -> list[list[str]]:
    """Write, hash and sync this rank's files, a thread each; returns the checksums of the parts of each."""
    files = plan.files_of(rank)
    jobs = [partial(_write_file, place, file, shards, storage) for file in files]
    written = work_through(jobs, len(jobs))
    if files:
        storage.sync_folder(place.folder)
    return written


def _write_file(place: Place, file: FilePlan, shards: Sequence[ShardLike], storage: Storage) -> list[str]:
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


def _values(shards: Sequence[ShardLike], source: Slice) -> Tensor:
    tensor = shards[source.index].tensor
    return tensor if tensor.numel() == source.stop - source.start else tensor[source.start : source.stop]
