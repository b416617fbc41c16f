"""Assignment of shards to ranks and files: a pure function of all ranks' proposals, equal on every rank.

Each rank sends a proposal (its addresses, not its tensors).  Every rank then runs `merge_proposals` over all of them
and computes the same plan or the same error without further communication.  Nothing has been written by then, so a
tag that differs between ranks, or a tensor with a hole, leaves no trace on disk.

A piece that one rank holds is written by that rank.  Then, from large to small, each replicated piece goes to the
rank with the fewest bytes so far (longest processing time first: at most 4/3 of the optimum).  A rank's pieces are
distributed over its writers, one file each, by the same rule.  Pieces too large to balance are split first, but never
below 16 MiB; a rank uses only as many writers as have 16 MiB to write.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
import torch

from zckpt.errors import CheckpointInputError
from zckpt.format import canonical
from zckpt.format.canonical import JSON
from zckpt.format.manifest import checksum
from zckpt.format.paths import check_tag
from zckpt.format.regions import Region, tiling_problem
from zckpt.format.safetensors_layout import FileLayout, TensorPart, dtype_name, dtype_of, place_parts
from zckpt.format.shard import ShardAddress, ShardLike, address_of, check_shard_again, describe

_MIN_NBYTES = 16 << 20  # minimum bytes of a split piece, and of a writer's file


@attrs.frozen(kw_only=True)
class SaveRequest:
    """Arguments of a save that must be equal on all ranks."""

    tag: str
    step: int
    latest: bool
    overwrite: Literal["refuse", "replace"]  # action if the tag exists
    writers: int = 1  # threads, and files, per rank

    @classmethod
    def of(cls, tag: str | None, step: int, *, latest: bool, overwrite: bool, writers: int) -> SaveRequest:
        """Build the request from the arguments of `save`."""
        return cls(
            tag=f"step-{step}" if tag is None else tag,
            step=step,
            latest=latest,
            overwrite="replace" if overwrite else "refuse",
            writers=writers,
        )

    def validate(self) -> SaveRequest:
        """Raise CheckpointInputError for an invalid argument; return self."""
        check_tag(self.tag)
        if isinstance(self.step, bool) or not isinstance(self.step, int) or not 0 <= self.step < 2**62:
            raise CheckpointInputError(f"step must be an int of at least 0, not {self.step!r}")
        if isinstance(self.writers, bool) or not isinstance(self.writers, int) or not 1 <= self.writers <= 64:
            raise CheckpointInputError(
                f"writers (threads per rank) must be an int from 1 to 64, not {self.writers!r}"
            )
        return self


@attrs.frozen
class ShardSlice:
    """Elements [start, stop) of a shard's tensor."""

    index: int  # among the shards of its rank
    start: int
    stop: int


@attrs.frozen
class FilePlan:
    """One file, and the sources of its values."""

    rank: int  # that writes it
    name: str
    layout: FileLayout
    sources: tuple[ShardSlice, ...]  # one per part of the layout


@attrs.frozen(kw_only=True)
class SavePlan:
    """A whole save except the values of its tensors."""

    request: SaveRequest
    attempt: str
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype, global shape; empty ones too
    files: tuple[FilePlan, ...]  # in the order of their ranks
    objects: dict[str, JSON]
    rank_objects: tuple[dict[str, JSON], ...]

    @property
    def nbytes(self) -> int:
        """Total size of the tensor files."""
        return sum(file.layout.nbytes for file in self.files)

    def files_of(self, rank: int) -> list[FilePlan]:
        return [file for file in self.files if file.rank == rank]


def file_name(rank: int, writer: int = 0) -> str:
    """ "rank00002.safetensors", "rank00002-1.safetensors"."""
    return f"rank{rank:05d}{f'-{writer}' if writer else ''}.safetensors"


def propose(
    request: SaveRequest,
    attempt: str,
    shards: Sequence[ShardLike],
    objects: Mapping[str, JSON],
    rank_objects: Mapping[str, JSON],
) -> JSON:
    """This rank's proposal, as JSON.  Raises CheckpointInputError if it cannot be saved."""
    request.validate()
    described = _describe_shards(shards)
    plain: dict[str, JSON] = canonical.plain(dict(objects), "objects")
    return {
        "request": attrs.asdict(request),
        "attempt": attempt,
        **described,
        "objects": plain,
        "digests": {key: checksum(canonical.dump(value)) for key, value in plain.items()},
        "rank_objects": canonical.plain(dict(rank_objects), "rank_objects"),
    }


def drop_objects(proposal: JSON, rank: int) -> JSON:
    """Drop the objects of ranks other than 0: only rank 0's are stored, and digests suffice to compare."""
    return proposal if rank == 0 else {**proposal, "objects": {}}


def _describe_shards(shards: Sequence[ShardLike]) -> dict[str, JSON]:
    """Checked names and kinds of shards: a model has many tensors, and few kinds of dtype, shape and region."""
    kinds: dict[tuple[str, ShardAddress], int] = {}
    kind_of = []
    for shard in shards:
        check_shard_again(shard)
        kind_of.append(kinds.setdefault((dtype_name(shard.tensor.dtype), address_of(shard)), len(kinds)))
    return {
        "names": [shard.name for shard in shards],
        "kind_of": kind_of,
        "kinds": [[dtype, each.shape, each.region.box, each.region.span] for dtype, each in kinds],
    }


@attrs.frozen
class _Offer:
    """One shard of a rank's proposal."""

    rank: int
    source: ShardSlice
    part: TensorPart


def merge_proposals(proposals: Sequence[JSON]) -> SavePlan:
    """Compute the plan from the proposals of all ranks, in rank order.  Raises CheckpointInputError if impossible."""
    request = SaveRequest(**_check_equal("save arguments", [each["request"] for each in proposals]))
    _check_objects([each["digests"] for each in proposals])
    offers = [offer for rank, each in enumerate(proposals) for offer in _offers(rank, each)]
    tensors = _tensors(offers)
    numel = [offer for offer in offers if offer.part.region.numel]
    owners = _assign(numel, len(proposals), request.writers)
    _check_coverage(tensors, owners)
    attempt = proposals[0]["attempt"]
    owned: dict[int, list[_Offer]] = defaultdict(list)
    for offer in owners:
        owned[offer.rank].append(offer)
    return SavePlan(
        request=request,
        attempt=attempt,
        tensors=tensors,
        files=tuple(
            _file_plan(rank, writer, offers, _metadata(request.tag, attempt, rank))
            for rank in range(len(proposals))
            for writer, offers in enumerate(_split_over_writers(owned[rank], request.writers))
        ),
        objects=proposals[0]["objects"],
        rank_objects=tuple(each["rank_objects"] for each in proposals),
    )


def _metadata(tag: str, attempt: str, rank: int) -> dict[str, str]:
    """Metadata inside every tensor file, so that errors can identify a file of another save."""
    return {"format": "pt", "zckpt_tag": tag, "zckpt_attempt": attempt, "zckpt_rank": str(rank)}


def _file_plan(rank: int, writer: int, offers: Sequence[_Offer], metadata: dict[str, str]) -> FilePlan:
    ordered = sorted(offers, key=_file_order)
    return FilePlan(
        rank,
        file_name(rank, writer),
        place_parts([offer.part for offer in ordered], metadata),
        tuple(offer.source for offer in ordered),
    )


def _split_over_writers(offers: Sequence[_Offer], writers: int) -> list[list[_Offer]]:
    """Distribute a rank's pieces over its writers, large ones first; [] for a rank without pieces."""
    count = min(writers, sum(offer.part.nbytes for offer in offers) // _MIN_NBYTES)
    if count <= 1:
        return [list(offers)] if offers else []
    lanes: list[list[_Offer]] = [[] for _ in range(count)]
    load = [0] * len(lanes)
    for offer in sorted(offers, key=lambda each: -each.part.nbytes):
        lane = load.index(min(load))
        lanes[lane].append(offer)
        load[lane] += offer.part.nbytes
    return [lane for lane in lanes if lane]


def _file_order(offer: _Offer) -> tuple[int, str, object, object]:
    """Sort key of a file's parts: decreasing itemsize keeps every tensor aligned."""
    return -offer.part.dtype.itemsize, offer.part.name, offer.part.region.box, offer.part.region.span


def _ranks_by_value(values: Sequence[JSON]) -> str:
    """ "'a' (rank 0, 1), 'b' (rank 2)": the values of all ranks, for an error."""
    ranks: dict[str, list[str]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[repr(value)].append(str(rank))
    shown = [f"{value} (rank {', '.join(who[:8])}{' ...' if len(who) > 8 else ''})" for value, who in ranks.items()]
    return ", ".join(shown[:8])


def _check_equal(what: str, values: Sequence[dict[str, JSON]]) -> dict[str, JSON]:
    for key in values[0]:
        found = [value[key] for value in values]
        if any(each != found[0] for each in found):
            raise CheckpointInputError(f"ranks disagree on {key} ({what}): {_ranks_by_value(found)}")
    return values[0]


def _check_objects(digests: Sequence[dict[str, str]]) -> None:
    """Raise unless every rank passes the same `objects` as rank 0, or none."""
    for rank, mine in enumerate(digests):
        differing = sorted(key for key in {*mine, *digests[0]} if mine.get(key) != digests[0].get(key))
        if mine and differing:
            raise CheckpointInputError(
                f"objects[{differing[0]!r}] of rank {rank} differs from rank 0's: objects are stored once for all "
                "ranks. Pass values that differ by rank in rank_objects."
            )


def _offers(rank: int, proposal: JSON) -> list[_Offer]:
    kinds = []
    for dtype, shape, box, span in proposal["kinds"]:
        torch_dtype = dtype_of(dtype)
        assert torch_dtype is not None, dtype  # the sender named it from the same table
        kinds.append((torch_dtype, tuple(shape), Region(tuple((lo, hi) for lo, hi in box), (span[0], span[1]))))
    made = []
    for index, (name, kind) in enumerate(zip(proposal["names"], proposal["kind_of"], strict=True)):
        dtype, shape, region = kinds[kind]
        made.append(_Offer(rank, ShardSlice(index, 0, region.numel), TensorPart(name, dtype, shape, region)))
    return made


def _tensors(offers: Sequence[_Offer]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    first: dict[str, _Offer] = {}
    for offer in offers:
        known = first.setdefault(offer.part.name, offer)
        if (known.part.dtype, known.part.shape) != (offer.part.dtype, offer.part.shape):
            raise CheckpointInputError(
                f"tensor {offer.part.name!r} is {describe(known.part.dtype, known.part.shape)} on rank {known.rank} "
                f"and {describe(offer.part.dtype, offer.part.shape)} on rank {offer.rank}"
            )
    return {name: (offer.part.dtype, offer.part.shape) for name, offer in first.items()}


def _assign(offers: Sequence[_Offer], world_size: int, writers: int) -> list[_Offer]:
    """Choose one owner for each distinct (name, region), or for each part of a large one."""
    holders: dict[tuple[str, Region], dict[int, _Offer]] = defaultdict(dict)
    for offer in offers:
        ranks = holders[offer.part.name, offer.part.region]
        if offer.rank in ranks:
            raise CheckpointInputError(
                f"rank {offer.rank} passed tensor {offer.part.name!r} {offer.part.region} twice (tied parameters are "
                "one tensor: pass them once)"
            )
        ranks[offer.rank] = offer
    total = sum(next(iter(ranks.values())).part.nbytes for ranks in holders.values())
    limit = max(_MIN_NBYTES, total // (2 * world_size * writers))
    load = [0] * world_size
    chosen, replicated = [], []
    for piece in (piece for ranks in holders.values() for piece in _split_large(ranks, limit)):
        if len(piece) > 1:
            replicated.append(piece)
            continue
        (owner,) = piece.values()
        load[owner.rank] += owner.part.nbytes
        chosen.append(owner)
    for piece in sorted(replicated, key=_assignment_order):
        owner = piece[min(piece, key=lambda rank: (load[rank], rank))]
        load[owner.rank] += owner.part.nbytes
        chosen.append(owner)
    return chosen


def _split_large(ranks: dict[int, _Offer], limit: int) -> list[dict[int, _Offer]]:
    """Split a piece into nearly equal pieces of at most `limit` bytes; most pieces stay whole."""
    part = next(iter(ranks.values())).part
    count = -(-part.nbytes // limit)
    if count == 1:
        return [ranks]
    first, numel = part.region.span[0], part.region.numel
    edges = [numel * i // count for i in range(count + 1)]
    return [
        {
            rank: _Offer(
                rank,
                ShardSlice(offer.source.index, start, stop),
                attrs.evolve(part, region=Region(part.region.box, (first + start, first + stop))),
            )
            for rank, offer in ranks.items()
        }
        for start, stop in itertools.pairwise(edges)
    ]


def _assignment_order(ranks: dict[int, _Offer]) -> tuple[int, str, object, object]:
    part = next(iter(ranks.values())).part
    return -part.nbytes, part.name, part.region.box, part.region.span


def _check_coverage(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], owners: Sequence[_Offer]) -> None:
    regions: dict[str, list[Region]] = defaultdict(list)
    for offer in owners:
        regions[offer.part.name].append(offer.part.region)
    for name, (dtype, shape) in tensors.items():
        if error := tiling_problem(shape, regions[name]):
            raise CheckpointInputError(
                f"the shards of tensor {name!r}, {describe(dtype, shape)}, do not cover it exactly once: {error}"
            )
