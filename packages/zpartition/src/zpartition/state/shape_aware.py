"""Optimizers that look at shapes, on flat shards: positions of tensors, and communication over ranks.

[Note: optimizers that look at shapes] LAMB needs the norms of whole tensors, Adafactor sums over rows and columns,
Muon whole matrices.  They can update flat shards like elementwise optimizers if they have a method

    place_on_ranks(segments, ranks)

`segments[shard][rank]` lists the `Cut`s that each rank has of a bucket, so that the optimizer knows all cuts; `ranks`
(`ShardRanks`) sums and exchanges tensors over these ranks.  The optimizer communicates inside its `step`, which all
ranks call together.  Its state of a shard is one value per element, or it has two more methods, which return None for
a tensor that was not placed:

    new_state(shard)                zeros, in its format for a shard
    segment_states(shard, state)    the same memory by segment, in their order, a dict of views for each: flat and of
                                    the segment's size for state cut as the tensor; of more dims for state that every
                                    holder of a part keeps whole (Adafactor's rows and columns); () for a count

An optimizer that cannot work on cuts in its configuration raises ValueError in `check_cuts()`, before anything is
moved.

Through `segment_states` checkpoints address state by parameter, whatever the cuts (addressing.py).  This package
imports none of these optimizers; zoptim.LAMB, Muon and Adafactor are examples.

Rejected: layouts whose cuts avoid tensors, or an owner for each tensor (spans would not be equal, and bucket,
reduction and checkpoint would depend on the optimizer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, final

import attrs
import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition.layout.layout import Layout

__all__ = ["Cut", "ShardRanks", "accepts_cuts", "cuts_of", "place_over_ranks"]


@attrs.frozen
class Cut:
    """The part of one tensor that lies in a shard, from element `start` on."""

    start: int
    shape: tuple[int, ...]  # of the whole tensor
    index: int  # of the tensor, among all that are partitioned
    span: tuple[int, int]  # [lo, hi) of the flattened tensor


@final
@attrs.frozen(eq=False)
class ShardRanks:
    """Ranks over which tensors are cut.

    Messages travel on `device`, where the group can send them, wherever the optimizer works.
    """

    group: ProcessGroup | None
    rank: int  # that owns these shards
    world_size: int  # 1 if nothing is cut, for any number of ranks
    device: torch.device  # of the weights

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the ranks, in place."""
        if self.world_size > 1:
            here = tensor.to(self.device)
            zcomm.all_reduce(here, self.group, label="sums over cut tensors")
            tensor.copy_(here)

    def exchange(self, outgoing: torch.Tensor, numels: Sequence[Sequence[int]]) -> torch.Tensor:
        """Send `numels[r][s]` elements from rank r to rank s; returns the elements for this rank, by source."""
        here = outgoing.to(self.device)
        return zcomm.all_to_all_v(here, numels, self.group, label="parts of cut matrices").to(outgoing.device)


class _AcceptsCuts(Protocol):
    """An optimizer that looks at shapes and accepts flat shards."""

    def place_on_ranks(self, segments: Mapping[torch.Tensor, Sequence[Sequence[Cut]]], ranks: ShardRanks) -> None: ...


def accepts_cuts(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` looks at shapes and accepts the positions of cuts."""
    return hasattr(optimizer, "place_on_ranks")


def check_cuts(optimizer: torch.optim.Optimizer) -> None:
    """Raise the ValueError of an optimizer that cannot work on cuts in its configuration."""
    check = getattr(optimizer, "check_cuts", None)
    if check is not None:
        check()


def cuts_of(layout: Layout) -> list[list[list[Cut]]]:
    """Return [bucket][rank]: the cuts that make up a rank's span of a bucket."""
    index_of = {slot.name: index for index, (_, slot) in enumerate(layout.slots())}
    return [
        [
            [Cut(p.offset, p.slot.shape, index_of[p.slot.name], p.span) for p in bucket.pieces(rank)]
            for rank in range(layout.num_shards)
        ]
        for bucket in layout.buckets
    ]


def place_over_ranks(
    optimizer: torch.optim.Optimizer,
    masters: Sequence[Parameter],
    layout: Layout,
    group: ProcessGroup | None,
    device: torch.device,
) -> None:
    """Describe to `optimizer` the tensors in the shards of all ranks.

    masters: this rank's shards, by bucket.
    group: the ranks that hold one copy together (unused with one shard); device: of the weights.

    Raises:
        ValueError: the optimizer cannot work on these shards.
    """
    ranks = ShardRanks(group, zcomm.group_rank(group) % layout.num_shards, layout.num_shards, device)
    cast(_AcceptsCuts, optimizer).place_on_ranks(dict(zip(masters, cuts_of(layout))), ranks)


def new_state(optimizer: torch.optim.Optimizer, tensor: Parameter) -> dict[str, torch.Tensor] | None:
    """Return zeros in the optimizer's format by segment; None if it has none."""
    make = getattr(optimizer, "new_state", None)
    found: dict[str, torch.Tensor] | None = None if make is None else make(tensor)
    return found


def segment_states(
    optimizer: torch.optim.Optimizer, tensor: Parameter, state: Mapping[str, Any]
) -> list[dict[str, torch.Tensor]] | None:
    """Return `state` of a shard by segment; None if it has a value per element, or none."""
    by_segment = getattr(optimizer, "segment_states", None)
    found: list[dict[str, torch.Tensor]] | None = by_segment(tensor, state) if by_segment and state else None
    return found
