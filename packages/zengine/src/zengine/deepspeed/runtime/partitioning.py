"""Partitions of `deepspeed.runtime.utils`: of lists of weights, and of tensors over ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy
import torch
from torch import Tensor

from zengine.deepspeed.comm import all_gather_into_tensor, broadcast, get_global_rank, get_rank, get_world_size

__all__ = [
    "PartitionedTensor",
    "align_dense_tensors",
    "all_gather_dp_groups",
    "all_gather_into_tensor_dp_groups",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
]


def prefix_sum_inc(weights: Iterable[Any]) -> list[Any]:
    """Return the sums of the first 1, 2, ... weights."""
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return bounds b with part p = items b[p] to b[p + 1] - 1; the first ones may have one more."""
    share, rest = divmod(num_items, num_parts)
    return [part * share + min(part, rest) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of DeepSpeed's partition: the least difference of the heaviest and the lightest part.

    The search is DeepSpeed's dynamic programme over prefixes; of equally good cuts the last is taken.  Pipelines are
    cut by `zpartition.pipeline` instead, which minimizes the heaviest stage.
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = numpy.concatenate(([0.0], numpy.cumsum(weights, dtype=float)))
    heaviest = numpy.full((num_parts + 1, count + 1), math.inf)
    lightest, cost = heaviest.copy(), heaviest.copy()
    cuts = numpy.zeros((num_parts + 1, count + 1), dtype=int)
    heaviest[0, 0] = cost[0, 0] = 0
    for part in range(1, num_parts + 1):
        for stop in range(part, count + 1):
            loads = sums[stop] - sums[:stop]
            most = numpy.maximum(heaviest[part - 1, :stop], loads)
            least = numpy.minimum(lightest[part - 1, :stop], loads)
            with numpy.errstate(invalid="ignore"):
                spread = numpy.nan_to_num(most - least, nan=math.inf)
            best = int(stop - 1 - numpy.argmin(spread[::-1]))
            cuts[part, stop], cost[part, stop] = best, spread[best]
            heaviest[part, stop], lightest[part, stop] = most[best], least[best]
    bounds = [count]
    for part in range(num_parts, 0, -1):
        bounds.append(int(cuts[part, bounds[-1]]))
    return bounds[::-1]


@final
class PartitionedTensor:
    """A tensor of which each rank of `group` keeps a run of elements.

    `to_meta()` and `data()` describe it to a rank that rebuilds it with `from_meta`.
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        """Keep this rank's part of `tensor`, which is equal on all ranks.  partition_meta is ignored."""
        self.group = group
        self.num_parts, self.rank = get_world_size(group), get_rank(group)
        self.orig_size, self.orig_device = list(tensor.size()), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, stop = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[start:stop].clone()

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None) -> PartitionedTensor:
        """Rebuild from `to_meta()` and this rank's part.

        Raises AssertionError for another dtype of `meta`, or if the part is of another rank or number of ranks.
        """
        assert meta.dtype == torch.long, f"meta is {meta.dtype}; pass the result of to_meta()"
        made = cls(local_part, group)
        numbers: list[int] = meta.tolist()
        dims = numbers[0]
        made.orig_size = numbers[1 : 1 + dims]
        num_parts, rank, *made.partition = numbers[1 + dims :]
        assert (num_parts, rank) == (made.num_parts, made.rank), "the part belongs to another rank or group"
        made.local_data = local_part.detach()
        made.orig_device = local_part.device if device is None else torch.device(device)
        return made

    def full(self, device: Any = None) -> Tensor:
        """Return the whole tensor.  A collective of the group."""
        sizes = [stop - start for start, stop in itertools.pairwise(self.partition)]
        flat = self.local_data.new_zeros(sum(sizes), device=self.orig_device if device is None else device)
        if len(set(sizes)) == 1:
            all_gather_into_tensor(flat, self.local_data.to(flat.device), group=self.group)
            return flat.view(self.orig_size)
        for part, piece in enumerate(torch.split(flat, sizes)):
            if part == self.rank:
                piece.copy_(self.local_data)
            if piece.numel():
                broadcast(piece, get_global_rank(self.group, part), group=self.group)
        return flat.view(self.orig_size)

    def to_meta(self) -> Tensor:
        """Return shape, ranks and bounds, (2 + dimensions + ranks + 2,) int64."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def data(self) -> Tensor:
        """Return this rank's part, 1-D."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Return the shape of this rank's part."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self.orig_size


def align_dense_tensors(tensor_list: Sequence[Tensor], alignment: int) -> list[Tensor]:
    """Return the tensors, with a tensor of zeros at the end if their elements are no multiple of `alignment`."""
    missing = -sum(tensor.numel() for tensor in tensor_list) % alignment
    return [*tensor_list, *([tensor_list[0].new_zeros(missing)] if missing else [])]


def all_gather_into_tensor_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
) -> None:
    """Fill each flat tensor with the parts of its group's ranks."""
    for flat, parts, group in zip(groups_flat, partitioned_param_groups, dp_process_group):
        if get_world_size(group) > 1:
            all_gather_into_tensor(flat, parts[get_rank(group)], group=group)


def all_gather_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """`all_gather_into_tensor_dp_groups`; the alignment and the bucket size are ignored: one message a group."""
    all_gather_into_tensor_dp_groups(groups_flat, partitioned_param_groups, dp_process_group)
