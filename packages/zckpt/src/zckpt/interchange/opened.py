"""A checkpoint of another format, opened where it lies and read like one of ours.

    with read_deepspeed("runs/old") as found:
        checkpoint = ForeignCheckpoint.of(found)
        checkpoint.read(shards)

Each rank maps the files and copies the boxes and spans that it wants; a tensor is joined whole in memory first, one
at a time.  Nothing is written.  A conversion (import_deepspeed) is faster to load again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, final

import attrs
import torch
from torch import Tensor

from zckpt.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointReadError
from zckpt.format.canonical import JSON
from zckpt.format.manifest import Described, Manifest, TensorEntry
from zckpt.format.shard import Shard, ShardLike
from zckpt.interchange.engine_state import NO_RANK_STATE
from zckpt.loading.plan_reads import LoadReport, ReadRequest, check_problems, merge_plans, plan_read
from zckpt.ranks import ALONE, Peers, Vote


class OpenedFormat(Protocol):
    """An open checkpoint of another format, such as DeepSpeedCheckpoint."""

    @property
    def path(self) -> Path: ...
    @property
    def tag(self) -> str: ...
    @property
    def step(self) -> int: ...
    def objects(self) -> dict[str, JSON]: ...
    def shards(self) -> Iterable[Shard]: ...
    def close(self) -> None: ...


@final
@attrs.frozen(eq=False)
class ForeignCheckpoint(Described):
    """A foreign checkpoint with the interface of `Checkpoint`; valid until `close`."""

    path: Path
    manifest: Manifest  # its tensors have no pieces
    parts: Mapping[str, Sequence[Shard]]  # name -> shards that cover the tensor
    source: OpenedFormat
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: OpenedFormat) -> ForeignCheckpoint:
        """Index the tensors.  Raises CheckpointCorrupt if elements of one are missing, or the state is invalid."""
        parts: dict[str, list[Shard]] = {}
        for shard in found.shards():
            parts.setdefault(shard.name, []).append(shard)
        for name, shards in parts.items():
            held, numel = sum(each.tensor.numel() for each in shards), math.prod(shards[0].global_shape)
            if held != numel or any(each.global_shape != shards[0].global_shape for each in shards):
                raise CheckpointCorrupt(
                    f"{found.path}: its files hold {held:,} of the {numel:,} elements of {name!r}",
                    path=str(found.path),
                )
        manifest = Manifest(
            tag=found.tag,
            step=found.step,
            attempt="0" * 16,
            world_size=1,
            tensors={
                name: TensorEntry(shards[0].tensor.dtype, tuple(shards[0].global_shape), ())
                for name, shards in parts.items()
            },
            files={},
            objects=found.objects(),
            rank_objects=(NO_RANK_STATE,),
            libraries={},
        )
        return cls(found.path, manifest, parts, found)

    @property
    def origin(self) -> str:
        """Location of the objects, for errors."""
        return str(self.path)

    def rank_objects(self, rank: int) -> dict[str, JSON]:
        """The JSON values of each rank, which other formats do not have."""
        return self.manifest.rank_objects[0]

    def tensor(self, name: str) -> Tensor:
        """Return one whole tensor in its stored dtype and shape; raises CheckpointMismatch for another name."""
        if name not in self.parts:
            raise CheckpointMismatch(f"checkpoint {self.path} has no tensor {name!r}")
        shards = self.parts[name]
        entry = self.manifest.tensors[name]
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        boxes: dict[Any, list[Shard]] = {}
        for shard in shards:
            boxes.setdefault(shard.box, []).append(shard)
        for box, members in boxes.items():
            target = whole[tuple(slice(lo, hi) for lo, hi in box)] if box else whole
            flat = torch.empty(target.numel(), dtype=whole.dtype)
            for member in members:
                flat[slice(*member.span)] = member.tensor.reshape(-1)
            target.copy_(flat.view(target.shape))
        return whole

    def read(
        self,
        wanted: Iterable[ShardLike],
        strict: bool = True,
        verify: bool | Literal["first"] = True,
        *,
        cast: bool = False,
        ignore: Sequence[str] = (),
        readers: int = 4,
        peers: Peers = ALONE,
    ) -> LoadReport:
        """Like Checkpoint.read; the bytes were verified when the files were opened."""
        request = ReadRequest(wanted, "raise" if strict else "ignore", verify, cast, tuple(ignore), readers)
        return self.prepare_read(request, peers)()

    def prepare_read(self, reading: ReadRequest, peers: Peers = ALONE) -> Callable[[], LoadReport]:
        """Run the phases of `read` before the copy; the returned function copies.  Every rank calls both."""
        vote = Vote(peers, f"load of {self.path}", CheckpointReadError)
        plans = []

        def check() -> JSON:
            plans.append(plan_read(self.manifest, reading.wanted, cast=reading.cast))
            return plans[0].as_json()

        report, problems = merge_plans(vote.run("checking", check), self.manifest, reading.ignore)
        check_problems(problems, strict=reading.on_mismatch == "raise", where=f"checkpoint {self.path}")

        def fill() -> JSON:
            name, whole = "", torch.empty(0)
            with torch.no_grad():
                for item in sorted(plans[0].items, key=lambda item: item.shard.name):
                    if item.shard.name != name:
                        name, whole = item.shard.name, self.tensor(item.shard.name)
                    box = whole[tuple(slice(lo, hi) for lo, hi in item.region.box)] if item.region.box else whole
                    values = box.reshape(-1)[slice(*item.region.span)]
                    item.shard.tensor.copy_(values.view_as(item.shard.tensor))
            return sum(item.region.numel * item.entry.dtype.itemsize for item in plans[0].items)

        def copy() -> LoadReport:
            return attrs.evolve(report, read_nbytes=vote.run("copying", fill)[peers.rank])

        return copy

    def close(self) -> None:
        """Close the files; tensors cannot be read any more."""
        self.source.close()
