"""Tensors that are cut over ranks: who talks for an optimizer, and who looks at which tensor whole.

[Note: cut tensors] A ZeRO rank holds flat shards, whose cuts go through tensors anywhere.  LAMB and Adafactor need
sums over a tensor, which ranks can add up; Muon needs the tensor itself, on one rank at a time.  Whoever cuts calls

    optimizer.place_on_ranks(segments, ranks)

with, for each shard of this rank, the segments that *every* rank has of its counterpart (`segments[shard][rank]`,
segments.py), so that all ranks know all cuts and decide alike without asking; and with `ranks`, which moves numbers.
The optimizer then keeps the state of its shards, and communicates inside `step`, the same messages on all ranks: only
shared values enter its decisions, and a shard without a gradient is an error.

The package knows no process group.  `Ranks` is all that it asks for.
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
        """Send `numels[r][s]` elements from rank r to rank s; returns what this rank receives.

        outgoing: flat, what this rank sends, by target.  The result: flat, of its dtype and device, by source.
        """


Layout = Mapping[Tensor, Sequence[Sequence[SegmentLike]]]  # [shard][rank]: what the ranks have of its counterparts


@attrs.frozen
class CutTensor:
    """A tensor and the parts of it that ranks hold."""

    shape: tuple[int, ...]
    parts: tuple[tuple[int, Segment], ...]  # (rank, segment), in the order of the ranks
    owner: int = 0  # the rank that sees it whole

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def is_cut(self) -> bool:
        """Return whether no rank has all of it."""
        return len(self.parts) > 1


def own_segments(layout: Layout, ranks: Ranks) -> dict[Tensor, tuple[Segment, ...]]:
    """The segments of this rank.  ValueError unless every shard has those of all ranks."""
    for shard, by_rank in layout.items():
        if len(by_rank) != ranks.world_size:
            raise ValueError(
                f"a shard of {shard.numel()} elements has segments of {len(by_rank)} ranks; there are "
                f"{ranks.world_size}. Give those of all, [] for a rank that has none."
            )
    return {shard: tuple(Segment.of(part) for part in by_rank[ranks.rank]) for shard, by_rank in layout.items()}


def cut_tensors(by_rank: Sequence[Sequence[SegmentLike]]) -> dict[int, CutTensor]:
    """The tensors of one shard and its counterparts, by index."""
    parts: dict[int, list[tuple[int, Segment]]] = {}
    for rank, segments in enumerate(by_rank):
        for segment in map(Segment.of, segments):
            parts.setdefault(segment.index, []).append((rank, segment))
    return {index: CutTensor(found[0][1].shape, tuple(found)) for index, found in sorted(parts.items())}


def plan_owners(
    shards: Iterable[Sequence[Sequence[SegmentLike]]], cost: Callable[[CutTensor], float], world_size: int
) -> list[dict[int, CutTensor]]:
    """The tensors of each shard by index, each with an owner.  Pure: all ranks come to the same.

    A tensor that a rank has whole stays there.  The others go, the dearest first, to the rank with the least to do
    among those that have a part of it; of equals to the one that has most.
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
    """Flat whole tensors, by index, of those that this rank owns: its own parts, and others' in one message.

    part_of: this rank's part of a tensor, flat, of the dtype and device of `like`.
    """
    outgoing = [part_of(segment) for _, segment in _travelling(tensors, ranks, source=ranks.rank)]
    received = _send(outgoing, _numels(tensors, ranks.world_size), ranks, like)
    whole = {i: like.new_empty(t.numel) for i, t in tensors.items() if t.owner == ranks.rank}
    for index, tensor in tensors.items():
        for _, segment in (part for part in tensor.parts if part[0] == tensor.owner == ranks.rank):
            whole[index][slice(*segment.range)] = part_of(segment)
    position = 0
    for index, segment in _travelling(tensors, ranks, target=ranks.rank):
        whole[index][slice(*segment.range)] = received[position : position + segment.numel]
        position += segment.numel
    return whole


def scatter_cut(
    tensors: Mapping[int, CutTensor], ranks: Ranks, whole: Mapping[int, Tensor], like: Tensor
) -> Iterator[tuple[Segment, Tensor]]:
    """The way back: (segment, its elements) for every part that this rank holds; `whole` are those that it owns."""
    there = list(_travelling(tensors, ranks, target=ranks.rank))
    outgoing = [whole[index][slice(*segment.range)] for index, segment in there]
    received = _send(outgoing, [list(row) for row in zip(*_numels(tensors, ranks.world_size))], ranks, like)
    position = 0
    for _, segment in _travelling(tensors, ranks, source=ranks.rank):
        yield segment, received[position : position + segment.numel]
        position += segment.numel
    for index, tensor in tensors.items():
        for _, segment in (part for part in tensor.parts if part[0] == tensor.owner == ranks.rank):
            yield segment, whole[index][slice(*segment.range)]


def _travelling(
    tensors: Mapping[int, CutTensor], ranks: Ranks, *, source: int | None = None, target: int | None = None
) -> Iterator[tuple[int, Segment]]:
    """(index, segment) of the parts that leave their rank, from `source` or to `target`, as a message has them."""
    for other in range(ranks.world_size):
        for index, tensor in tensors.items():
            for holder, segment in tensor.parts:
                here, there = (other, target) if source is None else (source, other)
                if holder != tensor.owner and (holder, tensor.owner) == (here, there):
                    yield index, segment


def _numels(tensors: Mapping[int, CutTensor], world_size: int) -> list[list[int]]:
    """[source][target]: elements that travel to owners."""
    numels = [[0] * world_size for _ in range(world_size)]
    for tensor in tensors.values():
        for holder, segment in tensor.parts:
            if holder != tensor.owner:
                numels[holder][tensor.owner] += segment.numel
    return numels


def _send(outgoing: Sequence[Tensor], numels: Sequence[Sequence[int]], ranks: Ranks, like: Tensor) -> Tensor:
    """Return what this rank receives; no message where nothing travels."""
    if not any(map(any, numels)):
        return like.new_empty(0)
    return ranks.exchange(torch.cat([like.new_empty(0), *outgoing]), numels)
