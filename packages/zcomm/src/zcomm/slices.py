"""Slices of any size from every rank to every rank.

`all_to_all` cuts into equal slices.  Where what goes from rank to rank differs, and everybody knows the whole table
of sizes, two ways lead there.  Through shared memory the slices are padded to the longest: memory is ten times as
fast as Gloo, so a few times the bytes still pay.  Over NCCL or Gloo slices have their own sizes, also in a group with
ranks on several hosts, whose all_to_all is Gloo's.  The ranks choose alike, because a group's transport is decided
for all of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm import checks
from zcomm.collectives import all_to_all, group_rank, group_size
from zcomm.handles import Call, named, start
from zcomm.shared import registry
from zcomm.shared.names import is_carried
from zcomm.shared.transport import Transport

__all__ = ["exchange_slices"]


def exchange_slices(
    input: Tensor, numels: Sequence[Sequence[int]], group: ProcessGroup | None = None, *, label: str = ""
) -> Tensor:
    """Send `numels[r][s]` elements from rank r to rank s; returns what this rank receives, by source.

    input: flat, contiguous, what this rank sends, by target.  numels: size x size, the same on all ranks.  The
    result: new, flat, of the same dtype and device.  Raises ValueError naming the call if input and table do not fit.
    """
    size, rank = group_size(group), group_rank(group)
    _check(label, input, numels, size, rank)
    if size == 1:
        return input.clone()
    if _goes_through_memory(input, group):
        return _padded(input, numels, group, label)
    received = [row[rank] for row in numels]
    output = input.new_empty(sum(received))
    total = sum(map(sum, numels))
    call = attrs.evolve(  # the table is what the ranks have in common, not what one of them sends
        Call.of("exchange_slices", label, size, input),
        numel=total,
        nbytes=total * input.element_size(),
        shape=(total,),
    )
    start(
        call,
        lambda: dist.all_to_all_single(output, input, received, list(numels[rank]), group=group, async_op=True),
        (output, input),
        async_op=False,
        group=group,
    )
    return output


def _goes_through_memory(input: Tensor, group: ProcessGroup | None) -> bool:
    """Whether `all_to_all` would copy between the ranks of one host, and send nothing."""
    return (
        input.is_cpu
        and is_carried(input.dtype, reduced=False)
        and isinstance(registry.transport_of(group), Transport)
    )


def _padded(input: Tensor, numels: Sequence[Sequence[int]], group: ProcessGroup | None, label: str) -> Tensor:
    size, rank = group_size(group), group_rank(group)
    longest = max(max(row) for row in numels)
    outgoing = input.new_zeros(size, longest)
    for target, part in enumerate(torch.split(input, list(numels[rank]))):
        outgoing[target, : part.numel()] = part
    incoming = torch.empty_like(outgoing)
    all_to_all(incoming.view(-1), outgoing.view(-1), group, label=label)
    return torch.cat([incoming[source, : numels[source][rank]] for source in range(size)])


def _check(label: str, input: Tensor, numels: Sequence[Sequence[int]], size: int, rank: int) -> None:
    checks.dense("exchange_slices", label, "input", input)
    if len(numels) != size or any(len(row) != size for row in numels):
        raise ValueError(
            f"{named('exchange_slices', label)}: numels has rows of {sorted({len(row) for row in numels})} and "
            f"{len(numels)} of them; there are {size} ranks, so it must be {size} x {size}."
        )
    if input.dim() != 1 or input.numel() != sum(numels[rank]):
        raise ValueError(
            f"{named('exchange_slices', label)}: input has shape {list(input.shape)}; rank {rank} sends "
            f"{list(numels[rank])}, so it must be flat with {sum(numels[rank])} elements."
        )
