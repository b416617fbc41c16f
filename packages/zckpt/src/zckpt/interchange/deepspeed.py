"""Import of DeepSpeed checkpoints, without DeepSpeed and without running code from the files.

    zckpt.interchange.import_deepspeed("runs/old", "runs/new")

Folders of every kind are read: ZeRO 0 to 3, pipelines, mixtures of experts, universal checkpoints.  The files are
mapped, not loaded: shards are views of them, written one after another.  The result is a normal checkpoint with
masters, optimizer state, step counts, counters, schedule and loss scale, and loads at any world size, stage and
parallel degree.  It has no random states and no data loader position, since DeepSpeed does not save them.
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
from zckpt.interchange import deepspeed_experts, deepspeed_pipeline
from zckpt.interchange.deepspeed_files import DeepSpeedFiles, VerifyShare, open_files
from zckpt.interchange.deepspeed_listing import choose_folder
from zckpt.interchange.deepspeed_run import ClassNames, run_objects
from zckpt.interchange.deepspeed_tensors import MASTER, ShardingRules, StatePart, place_shards, state_parts
from zckpt.interchange.deepspeed_universal import universal_parts
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
    def path(self) -> Path:
        """Folder of the checkpoint."""
        return self.files.folder

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
            return run_objects(self.files, self.class_names, self.engine_name)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise CheckpointCorrupt(
                f"{self.files.folder}: its state of the run is invalid: {type(error).__name__}: {error}",
                path=str(self.files.folder),
            ) from error

    def engine_name(self, name: str) -> str:
        """The name that our modules have for DeepSpeed's: of a pipeline's layer, or of a layer of experts."""
        if self.files.is_pipeline:
            name = deepspeed_pipeline.engine_name(name)
        return deepspeed_experts.engine_name(name)

    def shards(self) -> Iterator[Shard]:
        """Yield model.<name> (masters, frozen parameters, buffers) and optimizer.<state>.<name> (states)."""
        found = place_shards(self._parts(), self.rules)
        if self.files.is_pipeline:
            found = (
                (key, attrs.evolve(shard, name=deepspeed_pipeline.engine_name(shard.name))) for key, shard in found
            )
        for key, shard in deepspeed_experts.stack(found):
            prefix = MODEL if key == MASTER else f"{OPTIMIZER}{key}."
            yield attrs.evolve(shard, name=prefix + shard.name)

    def _parts(self) -> list[list[StatePart]]:
        """Everything that was saved, by tensor-parallel rank."""
        files = self.files
        if files.universal is not None:
            return [universal_parts(files)]
        if files.layers:
            return deepspeed_pipeline.pipeline_parts(files, self.rules.tied_layers)
        if files.experts:
            return [deepspeed_experts.expert_parts(files)]
        return [state_parts(tp_rank) for tp_rank in files.tp_ranks]

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
    tied_layers: Mapping[str, int] | None = None,
    optimizer: str = "",
    scheduler: str = "",
) -> DeepSpeedCheckpoint:
    """Open a checkpoint of ZeRO stage 0, 1, 2 or 3, of a pipeline, of experts, or a universal one.

    folder: the folder passed to `save_checkpoint`, or the folder of one tag.  tag: None reads `latest`, or
        `latest_universal` if that is the only one.
    tensor_parallel: glob pattern of names -> the dim along which the shards of tensor-parallel ranks are joined; the
        first match applies, and tensors without a match must be equal on all ranks.  Required with several such
        ranks.
    tied_layers: for a pipeline with tied layers at stage 0, whose files do not name them: key of the TiedLayerSpec ->
        number of its first layer.
    optimizer, scheduler: class names, if DeepSpeed's config does not name them.
    Verifies every byte with the checksums of the zip files, which torch writes but does not read.
    Raises CheckpointNotFound, CheckpointCorrupt, CheckpointReadError, CheckpointInputError.
    """
    found = open_files(choose_folder(Path(folder), tag))
    rules = ShardingRules(dict(tensor_parallel or {}), dict(tied_layers or {}))
    return DeepSpeedCheckpoint(found, rules, ClassNames(optimizer, scheduler))


def read_deepspeed_together(
    folder: str | os.PathLike[str], tag: str | None, index: int, count: int
) -> DeepSpeedCheckpoint:
    """Call `read_deepspeed` in `count` processes of one host; together they verify every byte once.

    index: of this process.  The checkpoint may be used after all of them have returned; if one raises, none may.
    """
    found = open_files(choose_folder(Path(folder), tag), VerifyShare(index, count))
    return DeepSpeedCheckpoint(found, ShardingRules({}, {}), ClassNames("", ""))


def import_deepspeed(
    folder: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    tag: str | None = None,
    tensor_parallel: Mapping[str, int] | None = None,
    tied_layers: Mapping[str, int] | None = None,
    optimizer: str = "",
    scheduler: str = "",
) -> Path:
    """Save a DeepSpeed checkpoint into `root` under the same tag; return the new checkpoint's folder.

    Arguments as for `read_deepspeed`.  Raises the errors of `read_deepspeed` and `zckpt.save`, and CheckpointMismatch
    if masters and weights contradict each other.
    """
    with read_deepspeed(
        folder,
        tag,
        tensor_parallel=tensor_parallel,
        tied_layers=tied_layers,
        optimizer=optimizer,
        scheduler=scheduler,
    ) as found:
        objects, shards = found.objects(), list(found.shards())
        if not shards:
            raise CheckpointMismatch(f"{folder} holds no tensors", path=str(folder))
        return save(root, found.tag, shards=shards, objects=objects, rank_objects=NO_RANK_STATE, step=found.step)
