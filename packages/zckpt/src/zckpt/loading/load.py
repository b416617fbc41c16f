"""The verb `load`: find a checkpoint and fill the tensors of a script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import attrs

from zckpt.errors import CheckpointReadError
from zckpt.format.canonical import JSON
from zckpt.gc_pause import collector_paused
from zckpt.loading.checkpoint import Checkpoint
from zckpt.loading.plan_reads import LoadReport
from zckpt.loading.select import find
from zckpt.ranks import ALONE, Peers, Vote
from zckpt.sources.views import OPTIMIZER, VIEWS_KEY, RestorePlan, Tensors, Views, plan_restore
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


@collector_paused()
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
    """Fill `tensors` from a checkpoint of `root`: the one of this tag, or the one that `find` selects.

    tensors: tensors by name, `views` of a model and an optimizer, or shards.
    strict: raise if a name is missing or extra; otherwise the report lists it.
    optimizer: for views.  "required" restores the optimizer's state and hyperparameters, and raises if the
        checkpoint has none; "skip" leaves the optimizer unchanged, like views of a model alone.
    verify, cast: as in Checkpoint.read.
    peers: ranks that load together; all read the checkpoint that rank 0 finds.

    Raises what `find` and Checkpoint.read raise, the same on every rank.  Existing optimizer tensors are filled in
    place; the rest of the optimizer changes only after everything is read.

    >>> import tempfile, torch, zckpt
    >>> root, model = tempfile.mkdtemp(), torch.nn.Linear(4, 2)
    >>> path = zckpt.save(root, tensors=zckpt.views(model), objects={"epoch": 3})
    >>> zckpt.load(root, tensors=zckpt.views(torch.nn.Linear(4, 2))).objects
    {'epoch': 3}
    """
    vote = Vote(peers, f"load from {os.fspath(root)}", CheckpointReadError)
    tags: Sequence[JSON] = vote.run("finding", lambda: find(root, tag, storage=storage).tag)
    opened: list[tuple[Checkpoint, RestorePlan]] = []  # of this rank; set by the closure that the vote runs

    def prepare() -> None:
        found = find(root, tag if peers.world_size == 1 else tags[0], storage=storage)
        kinds = {name: (entry.dtype, entry.shape) for name, entry in found.manifest.tensors.items()}
        saved = found.objects.get(VIEWS_KEY)
        opened.append((found, plan_restore(tensors, saved, kinds, optimizer=optimizer == "required")))

    vote.run("preparing", prepare)
    found, restore = opened[0]
    model_only = isinstance(tensors, Views) and (optimizer == "skip" or tensors.optimizer is None)
    ignore = [OPTIMIZER] if model_only else []
    report = found.read(restore.shards, strict, verify, cast=cast, ignore=ignore, peers=peers)
    vote.run("restoring", restore.commit)
    return Loaded(found, report)
