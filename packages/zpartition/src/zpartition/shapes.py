"""Optimizers that look at shapes, on flat shards: what a partition tells them, and how they reach the other ranks.

[Note: optimizers that look at shapes] LAMB needs the norms of whole tensors, Adafactor sums over rows and columns,
Muon whole matrices.  They can be given flat shards all the same, as elementwise optimizers are, if they have a method

    lay_out_over_ranks(segments, ranks)

`segments[shard][rank]` lists the `Cut`s that each rank has of a bucket, so that the optimizer knows all cuts; `ranks`
(`ShardRanks`) adds up and exchanges tensors over those ranks.  The optimizer communicates inside its `step`, which
all ranks call together.  What it keeps of a shard is one value an element, or it has two methods more, which answer
None for a tensor that is not laid out:

    new_state(shard)                zeros, as it keeps them of a shard
    segment_states(shard, state)    the same memory by segment, in their order, a dict of views for each: flat and of
                                    the segment's size for what is cut as the tensor is; of more dims for what every
                                    holder of a part keeps whole (Adafactor's rows and columns); () for a count

One that cannot work on cuts as it is configured says so in `refuse_cuts()`, a ValueError, before anything is moved.

Through `segment_states` checkpoints address state by parameter, whatever the cuts (addressing.py).  This package
knows none of those optimizers; zoptim.LAMB, Muon and Adafactor are such.

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
from zpartition.layout import Layout

__all__ = ["Cut", "ShardRanks", "cuts_of", "lay_out", "takes_cuts"]


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
    """The ranks over which tensors are cut.

    Messages travel on `device`, where the group can carry them, wherever the optimizer works.
    """

    group: ProcessGroup | None
    rank: int  # whose shards these are
    world_size: int  # 1 where nothing is cut, however many ranks there are
    device: torch.device  # of the weights

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the ranks, in place."""
        if self.world_size > 1:
            here = tensor.to(self.device)
            zcomm.all_reduce(here, self.group, label="sums over cut tensors")
            tensor.copy_(here)

    def exchange(self, outgoing: torch.Tensor, numels: Sequence[Sequence[int]]) -> torch.Tensor:
        """Send `numels[r][s]` elements from rank r to rank s; returns what this rank receives, by source."""
        here = outgoing.to(self.device)
        return zcomm.exchange_slices(here, numels, self.group, label="parts of cut matrices").to(outgoing.device)


class _TakesCuts(Protocol):
    """An optimizer that can be given flat shards although it looks at shapes."""

    def lay_out_over_ranks(
        self, segments: Mapping[torch.Tensor, Sequence[Sequence[Cut]]], ranks: ShardRanks
    ) -> None: ...


def takes_cuts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` looks at shapes and can be told of cuts."""
    return hasattr(optimizer, "lay_out_over_ranks")


def refuse_cuts(optimizer: torch.optim.Optimizer) -> None:
    """What an optimizer that takes cuts has against them as it is configured: its ValueError."""
    refuse = getattr(optimizer, "refuse_cuts", None)
    if refuse is not None:
        refuse()


def cuts_of(layout: Layout) -> list[list[list[Cut]]]:
    """[bucket][rank]: the cuts that make up a rank's span of a bucket."""
    index_of = {slot.name: index for index, (_, slot) in enumerate(layout.slots())}
    return [
        [
            [Cut(p.offset, p.slot.shape, index_of[p.slot.name], p.span) for p in bucket.pieces(rank)]
            for rank in range(layout.num_shards)
        ]
        for bucket in layout.buckets
    ]


def lay_out(
    optimizer: torch.optim.Optimizer,
    masters: Sequence[Parameter],
    layout: Layout,
    group: ProcessGroup | None,
    device: torch.device,
) -> None:
    """Tell `optimizer` where the tensors of this rank's shards, `masters` by bucket, and of all other ranks' lie.

    group: the ranks that hold one copy together (looked at where there are several shards); device: of the weights.

    Raises:
        ValueError: what the optimizer finds that it cannot do on shards.
    """
    ranks = ShardRanks(group, zcomm.group_rank(group) % layout.num_shards, layout.num_shards, device)
    cast(_TakesCuts, optimizer).lay_out_over_ranks(dict(zip(masters, cuts_of(layout))), ranks)


def new_state(optimizer: torch.optim.Optimizer, tensor: Parameter) -> dict[str, torch.Tensor] | None:
    """Zeros, as the optimizer keeps them of a shard by segment; None where it does not."""
    make = getattr(optimizer, "new_state", None)
    found: dict[str, torch.Tensor] | None = None if make is None else make(tensor)
    return found


def segment_states(
    optimizer: torch.optim.Optimizer, tensor: Parameter, state: Mapping[str, Any]
) -> list[dict[str, torch.Tensor]] | None:
    """`state` of a shard by segment; None where it has a value for each element, or none."""
    by_segment = getattr(optimizer, "segment_states", None)
    found: list[dict[str, torch.Tensor]] | None = by_segment(tensor, state) if by_segment and state else None
    return found
