"""`deepspeed.runtime.comm.coalesced_collectives`: several tensors reduced and scattered in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zengine.deepspeed.accelerator.real_accelerator import get_accelerator
from zengine.deepspeed.comm.verbs import reduce_scatter_tensor
from zengine.deepspeed.comm.world import get_rank, get_world_size

__all__ = ["all_to_all_quant_reduce", "reduce_scatter_coalesced"]


@torch.no_grad()
def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> list[Tensor]:
    """Return this rank's part of the mean of each flattened tensor; all are of one dtype.

    A tensor of n elements over r ranks has parts of ceil(n / r); the last ones may be shorter, or empty.  The values
    are divided before they are summed, so 16-bit sums do not overflow.
    """
    rank, size = get_rank(group), get_world_size(group)
    shares = [-(-tensor.numel() // size) for tensor in tensors]
    rows = tensors[0].new_zeros(size, sum(shares))  # a row for each rank: its parts of all tensors, padded
    starts = [sum(shares[:i]) for i in range(len(shares))]
    for tensor, start, share in zip(tensors, starts, shares):
        for owner, part in enumerate(torch.split(tensor.reshape(-1), share) if share else ()):
            torch.div(part, size, out=rows[owner, start : start + part.numel()])
    mine = torch.empty_like(rows[rank])
    reduce_scatter_tensor(mine, rows.view(-1), group=group)
    sizes = [max(0, min(share, tensor.numel() - rank * share)) for tensor, share in zip(tensors, shares)]
    return [mine[start : start + count] for start, count in zip(starts, sizes)]


@torch.no_grad()
def all_to_all_quant_reduce(tensors: Sequence[Tensor], groups: Mapping[str, Any]) -> list[Tensor]:
    """Return this rank's part of the mean of each flattened tensor, sent in 4 bits: first inside the hosts.

    groups: "local_H" of host H and "global_I" of the ranks with index I in their host, as made by
    `utils.groups._get_local_all_to_all_group`; on one host "local_0" suffices.
    A tensor of one dimension, or whose elements 2 * ranks does not divide, is sent as in
    `reduce_scatter_coalesced`.
    """
    size, places = get_world_size(), min(get_accelerator().device_count(), get_world_size())
    host, index = divmod(get_rank(), places)
    found = []
    for tensor in tensors:
        if tensor.dim() == 1 or tensor.numel() % (2 * size):
            found += reduce_scatter_coalesced([tensor])
            continue
        inside, between = groups[f"local_{host}"], groups[f"global_{index}"] if size > places else None
        mine = tensor.new_empty(tensor.numel() // size)
        pair = (inside, between) if size > places else None
        zcomm.reduce_scatter_quantized(mine, tensor.reshape(-1).clone(), inside, groups=pair)
        found.append(mine / size)
    return found
