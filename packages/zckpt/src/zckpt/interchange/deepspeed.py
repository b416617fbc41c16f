"""Import of DeepSpeed checkpoints, without DeepSpeed and without running code from the files.

    zckpt.interchange.import_deepspeed("runs/old", "runs/new")

The files are mapped, not loaded: shards are views of them, written one after another.  The result is a normal
checkpoint with masters, optimizer state, step counts, counters, schedule and loss scale, and loads at any world size
and stage.  It has no random states and no data loader position, since DeepSpeed does not save them.
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
    """An open DeepSpeed checkpoint; its shards are views of its files, valid until `close`."""

    files: DeepSpeedFiles
    rules: ShardingRules
    class_names: ClassNames

    @property
    def tag(self) -> str:
        return self.files.tag

    @property
    def step(self) -> int:
        """Optimizer steps, including skipped ones, as DeepSpeed counts them."""
        steps: int = self.objects()["clock"]["steps"]
        return steps

    def objects(self) -> dict[str, JSON]:
        """Counters, optimizer options, schedule, loss scale, client state; raises CheckpointCorrupt if invalid."""
        try:
            return run_objects(self.files, self.class_names)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise CheckpointCorrupt(
                f"{self.files.folder}: its state of the run is invalid: {type(error).__name__}: {error}",
                path=str(self.files.folder),
            ) from error

    def shards(self) -> Iterator[Shard]:
        """Yield model.<name> (masters, frozen parameters, buffers) and optimizer.<state>.<name> (states)."""
        tp_ranks = [state_parts(tp_rank) for tp_rank in self.files.tp_ranks]
        for key, shard in place_shards(tp_ranks, self.rules):
            prefix = MODEL if key == MASTER else f"{OPTIMIZER}{key}."
            yield attrs.evolve(shard, name=prefix + shard.name)

    def verify(self) -> None:
        """Compare the checksums of the zip files again, as when opening."""
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

    folder: the folder passed to `save_checkpoint`, or the folder of one tag.  tag: None reads `latest`.
    tensor_parallel: glob pattern of names -> the dim along which the shards of tensor-parallel ranks are joined; the
        first match applies, and tensors without a match must be equal on all ranks.  Required with several such
        ranks.
    optimizer, scheduler: class names, if DeepSpeed's config does not name them.
    Verifies every byte with the checksums of the zip files, which torch writes but does not read.
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
    """Save a DeepSpeed checkpoint into `root` under the same tag; return the new checkpoint's folder.

    Arguments as for `read_deepspeed`.  Raises the errors of `read_deepspeed` and `zckpt.save`, and CheckpointMismatch
    if masters and weights contradict each other.
    """
    with read_deepspeed(
        folder, tag, tensor_parallel=tensor_parallel, optimizer=optimizer, scheduler=scheduler
    ) as found:
        objects, shards = found.objects(), list(found.shards())
        if not shards:
            raise CheckpointMismatch(f"{folder} holds no tensors", path=str(folder))
        return save(root, found.tag, shards=shards, objects=objects, rank_objects=NO_RANK_STATE, step=found.step)
