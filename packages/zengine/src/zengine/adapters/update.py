"""Update of low rank: the value that a layer with adapters gives, and the sum of base and updates.

`merge` is the only place where a base and its updates are added.  It writes into new memory, so the base keeps its
bits however often one merges; adding an update to the weight and subtracting it again changes a third of bfloat16
weights within a hundred cycles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

__all__ = ["Adapted", "Update", "merge", "merge_scratch_bytes"]

_MERGED_NUMEL = 2**20  # elements in float64 at a time


@attrs.frozen(eq=False)
class Update:
    """scale * up @ down, which is added to a weight."""

    down: Tensor  # (rank, in): "A"
    up: Tensor  # (out, rank): "B"
    scale: float


@runtime_checkable
class Adapted(Protocol):
    """A linear layer with adapters."""

    adapter_enabled: bool  # whether the forward adds the updates

    def base_weight(self) -> Tensor:
        """Return the frozen weight, (out, in)."""

    def updates(self) -> list[Update]:
        """Return what the forward adds now."""


@torch.no_grad()
def merge(base: Tensor, updates: Sequence[Update]) -> Tensor:
    """Return base + the sum of updates in new memory, in the dtype of `base`, rounded once from float64.

    base: (out, in), not changed.  Beside the result, 8 MiB are needed.
    """
    merged = torch.empty_like(base, memory_format=torch.contiguous_format)
    rows = max(1, _MERGED_NUMEL // max(1, base.shape[1]))
    for start in range(0, base.shape[0], rows):
        part = slice(start, start + rows)
        total = base[part].double()
        for update in updates:
            total.addmm_(update.up[part].double(), update.down.double(), alpha=update.scale)
        merged[part].copy_(total)
    return merged


def merge_scratch_bytes(numel: int) -> int:
    """Return the bytes that `merge` needs beside its result of `numel` elements."""
    return min(numel, _MERGED_NUMEL) * torch.float64.itemsize
