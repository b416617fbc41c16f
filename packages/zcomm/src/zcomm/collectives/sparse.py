"""Sparse rows: rows of a large matrix from every rank to every rank, such as an embedding's gradient.

A dense all_reduce moves the whole vocabulary for a batch that touches a thousandth of it.  Here each rank sends only
its rows, as (indices, values): the lengths first, then both padded to the longest.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm.collectives.verbs import all_gather, group_size

__all__ = ["gather_rows"]


def gather_rows(
    indices: Tensor, values: Tensor, group: ProcessGroup | None = None, *, label: str = ""
) -> list[tuple[Tensor, Tensor]]:
    """Gather every rank's rows, in the order of the ranks.  A collective that waits for the lengths.

    indices: (n,) int64; values: (n, width) of one dtype and width on all ranks, on the same device; n may differ, and
    be 0.
    Raises ValueError if the two do not match.
    """
    if indices.dim() != 1 or values.dim() != 2 or len(indices) != len(values) or indices.dtype is not torch.int64:
        raise ValueError(
            f"gather_rows({label!r}): indices are {indices.dtype} of shape {list(indices.shape)}, values have shape "
            f"{list(values.shape)}; they must be (n,) torch.int64 and (n, width)."
        )
    size = group_size(group)
    if size == 1:
        return [(indices, values)]
    lengths = torch.empty(size, dtype=torch.int64, device=values.device)
    all_gather(lengths, torch.tensor([len(indices)], device=values.device), group, label=f"{label} lengths")
    counts = lengths.tolist()
    most, width = max(counts), values.size(1)
    all_indices = torch.empty(size * most, dtype=torch.int64, device=values.device)
    all_gather(all_indices, _padded(indices, most), group, label=f"{label} indices")
    rows = torch.empty(size * most * width, dtype=values.dtype, device=values.device)
    all_gather(rows, _padded(values, most).view(-1), group, label=f"{label} values")
    shaped = rows.view(size, most, width)
    return [(all_indices[rank * most :][:count], shaped[rank, :count]) for rank, count in enumerate(counts)]


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Contiguous copy, padded with rows of zeros to `length`."""
    made = tensor.new_zeros(length, *tensor.shape[1:])
    made[: len(tensor)] = tensor
    return made
