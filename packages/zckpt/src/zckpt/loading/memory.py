"""The host copy of a background save, readable like a checkpoint.

After a bad step (a NaN, a peer that restarted, an experiment to undo) the newest state is still in host memory, about
a hundred times faster to read than the disk.  `MemoryCheckpoint` has the interface of `Checkpoint`, so the same code
loads from either.

A copy belongs to one rank: it holds the shards of this rank and fills the same shards.  Reading other shards raises;
load the checkpoint from disk for those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, final

import attrs
import torch

from zckpt.errors import CheckpointMismatch, CheckpointReadError
from zckpt.format.canonical import JSON
from zckpt.format.manifest import Described, Manifest, TensorEntry
from zckpt.format.regions import Region
from zckpt.format.safetensors_layout import dtype_name, dtype_of
from zckpt.format.shard import ShardLike, region_of
from zckpt.loading.plan_reads import LoadReport, ReadRequest, check_problems, merge_plans, plan_read
from zckpt.ranks import ALONE, Peers, Vote


@final
@attrs.frozen(eq=False)
class MemoryCheckpoint(Described):
    """The copy of a save, made by `SaveHandle.checkpoint`; valid until the next save reuses its memory."""

    path: str  # its name in errors and logs
    manifest: Manifest  # of all ranks; its tensors have no pieces
    rank: int
    kept: Mapping[tuple[str, Region], torch.Tensor]  # this rank's copies, (n,) each
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        shards: Sequence[ShardLike],
        objects: dict[str, JSON],
        rank_objects: dict[str, JSON],
        *,
        tag: str,
        step: int,
        peers: Peers = ALONE,
    ) -> MemoryCheckpoint:
        """Build the checkpoint from the copies of all ranks; every rank calls it.

        Raises CheckpointMismatch on all ranks if the copies are of different saves.
        """
        vote = Vote(peers, f"opening of the memory copy of {tag!r}", CheckpointReadError)
        mine = {each.name: [dtype_name(each.tensor.dtype), list(each.global_shape)] for each in shards}
        answers = vote.run("comparing", lambda: {"tag": tag, "tensors": mine, "objects": rank_objects})
        tags = [answer["tag"] for answer in answers]
        if len(set(tags)) > 1:
            raise CheckpointMismatch(f"ranks hold copies of different saves: {', '.join(map(repr, tags))}")
        manifest = Manifest(
            tag=tag,
            step=step,
            attempt="0" * 16,
            world_size=peers.world_size,
            tensors={name: _entry(entry) for answer in answers for name, entry in answer["tensors"].items()},
            files={},
            objects=objects,
            rank_objects=tuple(answer["objects"] for answer in answers),
            libraries={},
        )
        kept = {(each.name, region_of(each)): each.tensor for each in shards}
        return cls(f"memory copy of {tag}", manifest, peers.rank, kept)

    @property
    def origin(self) -> str:
        """Location of the objects, for errors."""
        return self.path

    def rank_objects(self, rank: int) -> dict[str, JSON]:
        """The JSON values that `rank` saved."""
        return self.manifest.rank_objects[rank]

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
        """Like Checkpoint.read, for the shards that this rank saved; `verify` and `readers` have no effect.

        Raises CheckpointInputError, CheckpointMismatch; no tensor is modified then.
        """
        return self.prepare_read(
            ReadRequest(wanted, "raise" if strict else "ignore", verify, cast, tuple(ignore), readers), peers
        )()

    def prepare_read(self, reading: ReadRequest, peers: Peers = ALONE) -> Callable[[], LoadReport]:
        """Run the phases of `read` before the copy; the returned function copies.  Every rank calls both."""
        vote = Vote(peers, f"restoring of the {self.path}", CheckpointReadError)
        plans = []

        def check() -> JSON:
            plans.append(plan_read(self.manifest, reading.wanted, cast=reading.cast))
            for item in plans[0].items:
                if (item.shard.name, item.region) not in self.kept:
                    raise CheckpointMismatch(
                        f"{self.path}: rank {self.rank} holds no copy of {item.shard.name} {item.region}. A memory "
                        "copy restores only the shards it was made from; load other shards from disk."
                    )
            return plans[0].as_json()

        report, problems = merge_plans(vote.run("checking", check), self.manifest, reading.ignore)
        check_problems(problems, strict=reading.on_mismatch == "raise", where=self.path)

        def copy() -> LoadReport:
            with torch.no_grad():
                for item in plans[0].items:
                    item.shard.tensor.copy_(self.kept[item.shard.name, item.region].view_as(item.shard.tensor))
            return report

        return copy


def _entry(entry: JSON) -> TensorEntry:
    dtype = dtype_of(entry[0])
    assert dtype is not None
    return TensorEntry(dtype, tuple(entry[1]), ())
