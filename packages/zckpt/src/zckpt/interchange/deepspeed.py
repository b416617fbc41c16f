"""DeepSpeed checkpoints: read without DeepSpeed and without running anything of theirs, and written as our own.

    zckpt.interchange.import_deepspeed("runs/old", "runs/new")

The files are mapped, not loaded: shards are views of them, and go to the writer one after the other.  The result is
a checkpoint like any other, with masters, optimizer state, step counts, counters, schedule and loss scale, and loads
at any world size and stage.  What DeepSpeed does not save cannot be had: random states, the data loader's position.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import final

import attrs

from zckpt.errors import CheckpointCorrupt, CheckpointMismatch
from zckpt.format.canonical import JSON
from zckpt.format.shard import Shard
from zckpt.interchange.deepspeed_files import DeepSpeedFiles, choose_folder, open_files
from zckpt.interchange.deepspeed_run import ClassNames, run_objects
from zckpt.interchange.deepspeed_tensors import MASTER, ShardingRules, place_shards, state_parts
from zckpt.interchange.engine_state import MODEL, NO_RANK_STATE, OPTIMIZER
from zckpt.saving.save import save


@final
@attrs.frozen(eq=False)
class DeepSpeedCheckpoint:
    """An open one; its shards are views of its files, and stay valid until `close`."""

    files: DeepSpeedFiles
    rules: ShardingRules
    class_names: ClassNames

    @property
    def tag(self) -> str:
        return self.files.tag

    @property
    def step(self) -> int:
        """Boundary steps, skipped ones counted, as DeepSpeed does."""
        steps: int = self.objects()["clock"]["steps"]
        return steps

    def objects(self) -> dict[str, JSON]:
        """Counters, optimizer options, schedule, loss scale, the caller's state; CheckpointCorrupt for nonsense."""
        try:
            return run_objects(self.files, self.class_names)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise CheckpointCorrupt(
                f"{self.files.folder}: what it says of the run makes no sense: {type(error).__name__}: {error}",
                path=str(self.files.folder),
            ) from error

    def shards(self) -> Iterator[Shard]:
        """model.<name> for masters, frozen parameters and buffers; optimizer.<state>.<name> for the states."""
        tp_ranks = [state_parts(tp_rank) for tp_rank in self.files.tp_ranks]
        for key, shard in place_shards(tp_ranks, self.rules):
            prefix = MODEL if key == MASTER else f"{OPTIMIZER}{key}."
            yield attrs.evolve(shard, name=prefix + shard.name)

    def verify(self) -> None:
        """Compare the checksums of the zip files once more, as was done at opening."""
        self.files.verify()

    def close(self) -> None:
        self.files.close()

    def __enter__(self) -> DeepSpeedCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_deepspeed(
    folder: str | os.PathLike[str],
    tag: str | None = None,
    *,
    tensor_parallel: Mapping[str, int] | None = None,
    optimizer: str = "",
    scheduler: str = "",
) -> DeepSpeedCheckpoint:
    """Open a checkpoint of ZeRO stage 0, 1, 2 or 3.

    folder: what was given to `save_checkpoint`, or the folder of one tag.  tag: None takes what `latest` says.
    tensor_parallel: glob pattern of names -> the dim along which tensor-parallel ranks are joined; the first match
        decides, tensors without one must be equal on all ranks.  Needed if there are several such ranks.
    optimizer, scheduler: names of classes, where DeepSpeed's config does not name them.
    Every byte is compared with the checksums of the zip files, which torch writes and does not read.
    Raises CheckpointNotFound, CheckpointCorrupt, CheckpointReadError, CheckpointInputError.
    """
    found = open_files(choose_folder(Path(folder), tag))
    return DeepSpeedCheckpoint(found, ShardingRules(dict(tensor_parallel or {})), ClassNames(optimizer, scheduler))


def import_deepspeed(
    folder: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    tag: str | None = None,
    tensor_parallel: Mapping[str, int] | None = None,
    optimizer: str = "",
    scheduler: str = "",
) -> Path:
    """Write a DeepSpeed checkpoint into `root` as one of ours, under the same tag; returns its folder.

    The arguments are those of `read_deepspeed`.  Raises what that and `zckpt.save` do, and CheckpointMismatch if
    masters and weights do not belong together.
    """
    with read_deepspeed(
        folder, tag, tensor_parallel=tensor_parallel, optimizer=optimizer, scheduler=scheduler
    ) as found:
        objects, shards = found.objects(), list(found.shards())
        if not shards:
            raise CheckpointMismatch(f"{folder} holds no tensors", path=str(folder))
        return save(root, found.tag, shards=shards, objects=objects, rank_objects=NO_RANK_STATE, step=found.step)
