"""Slices of any size from every rank to every rank.

`all_to_all` cuts into equal slices.  Where what goes from rank to rank differs, and everybody knows the whole table
of sizes, it is runs.py that sends, in one run from rank to rank: no slice is padded to the longest, neither through
shared memory nor over NCCL or Gloo.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm import checks
from zcomm.collectives import group_rank, group_size
from zcomm.handles import named
from zcomm.runs import trade

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
    counts = [[(count,) for count in row] for row in numels]
    return trade("exchange_slices", label, input, counts, group)


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
