"""Sparse gradient of an embedding: the rows that were looked up.

`nn.Embedding(sparse=True)` gives gradients as (indices, values).  In a bucket they would be as large as the
vocabulary; as rows they are as large as the batch.  The optimizer reads a dense gradient, because its moments are
dense.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import attrs
import torch
from torch import Tensor

__all__ = ["SparseRows", "add_rows"]


@final
@attrs.define(eq=False)
class SparseRows:
    """Gradient of shape (rows, width) on one rank, as rows that are not summed yet."""

    width: int
    indices: list[Tensor] = attrs.field(factory=list)  # (n,) int64 each
    values: list[Tensor] = attrs.field(factory=list)  # (n, width) each

    def add(self, grad: Tensor) -> None:
        """Add a gradient: sparse, or dense if the weight is also used otherwise."""
        if grad.layout is torch.sparse_coo:
            grad = grad.coalesce()
            self.indices.append(grad.indices()[0])
            self.values.append(grad.values().reshape(-1, self.width))
        else:
            dense = grad.reshape(-1, self.width)
            self.indices.append(torch.arange(len(dense), device=grad.device))
            self.values.append(dense)

    def packed(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (indices (n,), unique and ascending; values (n, width) of `dtype`, summed in float32 or wider)."""
        if not self.indices:
            none = torch.empty(0, dtype=torch.int64, device=device)
            return none, torch.empty(0, self.width, dtype=dtype, device=device)
        indices, places = torch.cat(self.indices).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        wide = torch.promote_types(self.values[0].dtype, torch.float32)
        total = torch.zeros(len(indices), self.width, dtype=wide, device=device)
        total.index_add_(0, places, torch.cat(self.values).to(wide))
        return indices, total.to(dtype)

    def dense(self, like: Tensor) -> Tensor:
        """Return the sum of the rows as a tensor of the shape of `like`, in float32 or wider."""
        indices, values = self.packed(torch.promote_types(like.dtype, torch.float32), like.device)
        return torch.zeros(like.shape, dtype=values.dtype, device=like.device).index_add_(0, indices, values)

    def clear(self) -> None:
        self.indices.clear()
        self.values.clear()


def add_rows(kept: Tensor, span: tuple[int, int], parts: Iterable[tuple[Tensor, Tensor]], factor: float) -> None:
    """Add factor * rows to `kept`, one part after the other.

    kept: (hi - lo,) elements [lo, hi) of the flattened (rows, width) gradient; a row may be cut by either end.
    parts: (indices (n,), each at most once; values (n, width)).
    """
    lo, hi = span
    for indices, values in parts:
        width = values.size(1)
        first, last = -(-lo // width), hi // width  # rows that lie completely inside
        values = values.to(kept.dtype)
        inside = (indices >= first) & (indices < last)
        if first < last:
            whole = kept[first * width - lo : last * width - lo].view(-1, width)
            whole.index_add_(0, indices[inside] - first, values[inside], alpha=factor)
        for row in {lo // width, (hi - 1) // width} if hi > lo else set():
            start, stop = max(lo, row * width), min(hi, (row + 1) * width)
            if first <= row < last or start >= stop:
                continue
            for value in values[indices == row]:
                kept[start - lo : stop - lo].add_(value[start - row * width : stop - row * width], alpha=factor)
