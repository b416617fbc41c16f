"""The verb `load`: find, and fill what a plain script holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import attrs

from zckpt.errors import CheckpointReadError
from zckpt.format.canonical import JSON
from zckpt.loading.checkpoint import Checkpoint
from zckpt.loading.plan_reads import LoadReport
from zckpt.loading.select import find
from zckpt.ranks import ALONE, Peers, Vote
from zckpt.sources.views import OPTIMIZER, VIEWS_KEY, RestorePlan, Tensors, Views, targets
from zckpt.storage.storage import LOCAL, Storage


@attrs.frozen(eq=False)
class Loaded:
    """Result of `load`."""

    checkpoint: Checkpoint
    report: LoadReport

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def objects(self) -> dict[str, JSON]:
        """The `objects` given to `save`."""
        return {key: value for key, value in self.checkpoint.objects.items() if key != VIEWS_KEY}


def load(
    root: str | os.PathLike[str],
    tag: str | None = None,
    *,
    tensors: Tensors,
    strict: bool = True,
    optimizer: Literal["required", "skip"] = "required",
    verify: bool | Literal["first"] = True,
    cast: bool = False,
    peers: Peers = ALONE,
    storage: Storage = LOCAL,
) -> Loaded:
    """Fill `tensors` from a checkpoint of `root`: of this tag, or the one that `find` chooses.

    tensors: tensors by name, `views` of a model and an optimizer, or shards.
    strict: refuse if something is missing or left over; otherwise the report lists it.
    optimizer: of views only.  "required": the optimizer's state must be there, and is restored with the
        hyperparameters; "skip": it is left as it is, whether the checkpoint has one or not, as for
        views of a model alone.
    verify, cast: as in Checkpoint.read.
    peers: ranks that load together; all take the checkpoint that rank 0 finds.

    Raises what `find` and Checkpoint.read raise, on every rank alike.  Tensors that an optimizer has already are
    filled in place; the rest of it changes only after all is read.
    """
    vote = Vote(peers, f"load from {os.fspath(root)}", CheckpointReadError)
    tags: Sequence[JSON] = vote.run("finding", lambda: find(root, tag, storage=storage).tag)
    opened: list[tuple[Checkpoint, RestorePlan]] = []  # this rank's, out of the closure that the team runs

    def prepare() -> None:
        found = find(root, tag if peers.world_size == 1 else tags[0], storage=storage)
        kinds = {name: (entry.dtype, entry.shape) for name, entry in found.manifest.tensors.items()}
        saved = found.objects.get(VIEWS_KEY)
        opened.append((found, targets(tensors, saved, kinds, optimizer=optimizer == "required")))

    vote.run("preparing", prepare)
    found, restore = opened[0]
    model_only = isinstance(tensors, Views) and (optimizer == "skip" or tensors.optimizer is None)
    ignore = [OPTIMIZER] if model_only else []
    report = found.read(restore.shards, strict, verify, cast=cast, ignore=ignore, peers=peers)
    vote.run("restoring", restore.commit)
    return Loaded(found, report)
