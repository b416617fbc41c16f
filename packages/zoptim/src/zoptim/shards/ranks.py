"""Tensors that are cut over ranks: owners, gather and scatter, and the protocol of communication.

[Note: cut tensors] A ZeRO rank holds flat shards, whose cuts may lie inside tensors.  LAMB and Adafactor need sums
over a tensor, which ranks all-reduce; Muon needs the whole tensor, on one rank.  The partition calls

    optimizer.place_on_ranks(segments, ranks)

`segments[shard][rank]` lists the segments (segments.py) that *every* rank has of the bucket of which `shard` is this
rank's part.  All ranks thus know all cuts and make the same decisions without communication.  `ranks` sums and
exchanges tensors.  The optimizer keeps the state of its own shards and communicates inside `step`, with the same
messages on all ranks: decisions use shared values only, and a shard without a gradient raises.

The package uses no process group; `Ranks` is the whole interface.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from zoptim.shards.segments import Segment, SegmentLike

__all__ = ["CutTensor", "Ranks", "gather_cut", "own_segments", "plan_owners", "scatter_cut"]


class Ranks(Protocol):
    """The ranks that hold the shards."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> object:
        """Sum `tensor` over the ranks, in place."""

    def exchange(self, outgoing: Tensor, numels: Sequence[Sequence[int]]) -> Tensor:
        """Send `numels[r][s]` elements from rank r to rank s; return the received elements.

        outgoing: flat, the sent elements in the order of targets.  The result: flat, of its dtype and device, in the
        order of sources.
        """


Layout = Mapping[Tensor, Sequence[Sequence[SegmentLike]]]  # [shard][rank]: the segments of that rank's shard


@attrs.frozen
class CutTensor:
    """A tensor, its parts on all ranks, and its owner."""

    shape: tuple[int, ...]
    parts: tuple[tuple[int, Segment], ...]  # (rank, segment), in the order of the ranks
    owner: int = 0  # the rank that gathers the whole tensor

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def is_cut(self) -> bool:
        """Return whether the tensor has several parts."""
        return len(self.parts) > 1


def own_segments(layout: Layout, ranks: Ranks) -> dict[Tensor, tuple[Segment, ...]]:
    """Return the segments of this rank.  Raises ValueError unless every shard has segments of all ranks."""
    for shard, by_rank in layout.items():
        if len(by_rank) != ranks.world_size:
            raise ValueError(
                f"a shard of {shard.numel()} elements has segments of {len(by_rank)} ranks; there are "
                f"{ranks.world_size}. Give a list for each rank, [] for a rank without segments."
            )
    return {shard: tuple(Segment.of(part) for part in by_rank[ranks.rank]) for shard, by_rank in layout.items()}


def cut_tensors(by_rank: Sequence[Sequence[SegmentLike]]) -> dict[int, CutTensor]:
    """Return the tensors of one bucket, by index."""
    parts: dict[int, list[tuple[int, Segment]]] = {}
    for rank, segments in enumerate(by_rank):
        for segment in map(Segment.of, segments):
            parts.setdefault(segment.index, []).append((rank, segment))
    return {index: CutTensor(found[0][1].shape, tuple(found)) for index, found in sorted(parts.items())}


def plan_owners(
    shards: Iterable[Sequence[Sequence[SegmentLike]]], cost: Callable[[CutTensor], float], world_size: int
) -> list[dict[int, CutTensor]]:
    """Assign owners: return the tensors of each shard, by index.  Pure, so all ranks get the same result.

    A tensor that is whole on one rank stays there.  The others are assigned greedily, the most expensive first, to
    the least loaded rank among those that hold a part; of equally loaded ranks to the one with the largest part.
    """
    found = [cut_tensors(by_rank) for by_rank in shards]
    loads = [0.0] * world_size
    cut = [(position, index) for position, tensors in enumerate(found) for index in tensors]
    for position, index in sorted(cut, key=lambda at: (found[at[0]][at[1]].is_cut, -cost(found[at[0]][at[1]]), at)):
        tensor = found[position][index]
        owner, _ = min(tensor.parts, key=lambda part: (loads[part[0]], -part[1].numel, part[0]))
        loads[owner] += cost(tensor)
        found[position][index] = attrs.evolve(tensor, owner=owner)
    return found


def gather_cut(
    tensors: Mapping[int, CutTensor], ranks: Ranks, part_of: Callable[[Segment], Tensor], like: Tensor
) -> dict[int, Tensor]:
    """Gather the tensors that this rank owns, in one message; return them flat, by index.

    part_of: returns this rank's part of a tensor, flat, of the dtype and device of `like`.
    """
    outgoing = [part_of(segment) for _, segment in _sent_parts(tensors, ranks, source=ranks.rank)]
    received = _send(outgoing, _sent_numels(tensors, ranks.world_size), ranks, like)
    whole = {i: like.new_empty(t.numel) for i, t in tensors.items() if t.owner == ranks.rank}
    for index, tensor in tensors.items():
        for _, segment in (part for part in tensor.parts if part[0] == tensor.owner == ranks.rank):
            whole[index][slice(*segment.range)] = part_of(segment)
    position = 0
    for index, segment in _sent_parts(tensors, ranks, target=ranks.rank):
        whole[index][slice(*segment.range)] = received[position : position + segment.numel]
        position += segment.numel
    return whole


def scatter_cut(
    tensors: Mapping[int, CutTensor], ranks: Ranks, whole: Mapping[int, Tensor], like: Tensor
) -> Iterator[tuple[Segment, Tensor]]:
    """Send the tensors `whole`, which this rank owns, back; yield (segment, elements) for every part on this rank."""
    there = list(_sent_parts(tensors, ranks, target=ranks.rank))
    outgoing = [whole[index][slice(*segment.range)] for index, segment in there]
    received = _send(outgoing, [list(row) for row in zip(*_sent_numels(tensors, ranks.world_size))], ranks, like)
    position = 0
    for _, segment in _sent_parts(tensors, ranks, source=ranks.rank):
        yield segment, received[position : position + segment.numel]
        position += segment.numel
    for index, tensor in tensors.items():
        for _, segment in (part for part in tensor.parts if part[0] == tensor.owner == ranks.rank):
            yield segment, whole[index][slice(*segment.range)]


def _sent_parts(
    tensors: Mapping[int, CutTensor], ranks: Ranks, *, source: int | None = None, target: int | None = None
) -> Iterator[tuple[int, Segment]]:
    """Yield (index, segment) of the parts that are sent from `source` or to `target`, in the order of the message."""
    for other in range(ranks.world_size):
        for index, tensor in tensors.items():
            for holder, segment in tensor.parts:
                here, there = (other, target) if source is None else (source, other)
                if holder != tensor.owner and (holder, tensor.owner) == (here, there):
                    yield index, segment


def _sent_numels(tensors: Mapping[int, CutTensor], world_size: int) -> list[list[int]]:
    """Return [source][target]: the numbers of elements that are sent to owners."""
    numels = [[0] * world_size for _ in range(world_size)]
    for tensor in tensors.values():
        for holder, segment in tensor.parts:
            if holder != tensor.owner:
                numels[holder][tensor.owner] += segment.numel
    return numels


def _send(outgoing: Sequence[Tensor], numels: Sequence[Sequence[int]], ranks: Ranks, like: Tensor) -> Tensor:
    """Exchange elements; return the received ones.  No message if all numels are 0."""
    if not any(map(any, numels)):
        return like.new_empty(0)
    return ranks.exchange(torch.cat([like.new_empty(0), *outgoing]), numels)
