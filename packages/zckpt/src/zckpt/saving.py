"""The verb `save`: plan, prepare, write, commit, publish, each stage ended by a vote of all ranks.

Durability is argued in commit.py, agreement in team.py, the plan in planning.py.  After any failure all ranks raise
the same error, the attempt's folder is gone, and every earlier checkpoint is as it was.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from . import safefile
from .canonical import JSON
from .commit import Bystander, Keeper
from .errors import CheckpointWriteError
from .manifest import library_versions
from .peers import ALONE, Peers
from .places import Place
from .planning import Request, SavePlan, file_name, propose, settle, trim
from .shard import ShardLike
from .storage import LOCAL, Storage
from .team import Team, os_error_text


def save(
    root: str | os.PathLike[str],
    tag: str,
    *,
    shards: Iterable[ShardLike],
    objects: Mapping[str, JSON],
    rank_objects: Mapping[str, JSON] = {},
    peers: Peers = ALONE,
    step: int = 0,
    latest: bool = True,
    overwrite: bool = False,
    storage: Storage = LOCAL,
) -> Path:
    """Save one checkpoint; returns its folder, `<root>/<tag>`.  Every rank of `peers` calls it alike.

    shards: what this rank holds.  All ranks' shards together make each tensor whole; a region that several ranks
        give is written by one of them.  The tensors are read in place and must not change before the return.
    objects: JSON values of the run, the same on every rank (or {} on all but rank 0); see `canonical`.
    rank_objects: JSON values of this rank, such as its random state.
    step: orders the checkpoints of a root.
    latest: make `<root>/latest` name this tag.
    overwrite: replace a checkpoint of this tag instead of refusing.

    On return the checkpoint survives a power cut.  Raises, on every rank alike: CheckpointInputError (what was given
    cannot be saved, or ranks disagree), CheckpointExists, CheckpointWriteError (disk or peers failed; names the rank
    and the path).
    """
    folder, mine = Path(root), list(shards)
    request = Request(tag=tag, step=step, latest=latest, overwrite="replace" if overwrite else "refuse")
    team = Team(peers, f"save of {tag!r:.200} into {folder}", CheckpointWriteError)

    def proposal() -> JSON:
        return trim(propose(request, secrets.token_hex(8), mine, objects, rank_objects), peers.rank)

    plan = settle(team.together("planning", proposal))
    place = Place(folder, plan.request.tag, plan.attempt)
    with _keeper(place, plan, peers, storage) as keeper:
        team.together("preparing", keeper.prepare)
        reports = team.together("writing", lambda: write_rank(place, plan, mine, peers.rank, storage))
        team.together("committing", lambda: keeper.commit(reports))
        team.together("publishing", keeper.publish)
    return place.final


def _keeper(place: Place, plan: SavePlan, peers: Peers, storage: Storage) -> Bystander:
    if peers.rank != 0:
        return Bystander()
    from . import __version__  # not at the top: the package imports this module

    owner = f"pid {os.getpid()} on {socket.gethostname()}, tag {place.tag!r}, attempt {place.attempt}"
    return Keeper(place, plan, storage, library_versions(__version__), owner)


def write_rank(place: Place, plan: SavePlan, shards: Sequence[ShardLike], rank: int, storage: Storage) -> list[str]:
    """Write, hash and sync this rank's file; returns the checksum of each part of its layout."""
    layout = plan.layouts[rank]
    if not layout.parts:
        return []
    path = place.folder / file_name(rank)
    try:
        with storage.create(path) as writer:
            checksums = safefile.write(writer, layout, (shards[i].tensor for i in plan.sources[rank]))
        storage.sync_folder(place.folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointWriteError(
            f"{os_error_text(error)}: the file needs {layout.nbytes:,} bytes, "
            f"{storage.free_bytes(place.root):,} are free",
            path=str(path),
        ) from error
    return checksums
