"""Tables in device memory: addresses of the rows' streams, and the rows' chunks.

Addresses of gradients may change from step to step.  New ones are arguments of a small launch, up to 480 at a time:
no allocation, no synchronization, and a CUDA graph has its own copy.  Rejected: copying from pinned host memory,
which must not change until the device has read it, and as long as a graph may be replayed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from zoptim.backends.contract import Streams
from zoptim.backends.memory import addresses, copy_to

__all__ = ["GRADS", "Columns", "Table", "columns_of", "make_items"]

PATCH_LENGTH = 480  # addresses in the arguments of one launch (ZK_PATCH)
GRADS = 1  # the column of gradients
_PATCH = struct.Struct(f"<Q3q{PATCH_LENGTH}Q")  # zk_patch_args

Columns = list[list[int] | None]  # 64-bit words, one per row; None is a column of zeros


def columns_of(streams: Streams) -> Columns:
    """Return the columns of addresses of zk_row, in its order."""
    states, scales = [*streams.states], [*streams.scales]
    lists = [streams.weights, streams.grads, streams.remainders, streams.copies]
    lists += states + [[]] * (3 - len(states)) + scales + [[]] * (3 - len(scales)) + [streams.steps]
    return [addresses(tensors) if tensors else None for tensors in lists]


def make_items(numels: Sequence[int], chunk_numel: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Return (items, 2) int32 pairs of row and chunk on `device`, in order, and the first item of each row."""
    counts = torch.tensor([-(-numel // chunk_numel) for numel in numels], dtype=torch.int64)
    ends = counts.cumsum(0)
    rows = torch.repeat_interleave(torch.arange(len(numels)), counts)
    chunks = torch.arange(rows.numel()) - (ends - counts)[rows]
    items = torch.stack([rows, chunks], 1).to(torch.int32)
    return copy_to(device, items), (ends - counts).tolist()


@attrs.define(eq=False)
class Table:
    """Rows of 64-bit words on a device; the first columns are addresses that may change.

    Invariant: after the launches of `move`, column k of `words` holds `known[k]`.
    """

    words: Tensor  # (rows, columns) int64
    known: Columns  # the columns that move

    @classmethod
    def make(cls, moving: Columns, fixed: Sequence[Sequence[int]], device: torch.device) -> Table:
        """Make a table of `moving` columns followed by `fixed` ones."""
        zeros = [0] * len(fixed[0])
        columns = [zeros if column is None else column for column in moving] + [[*column] for column in fixed]
        return cls(copy_to(device, torch.tensor(columns, dtype=torch.int64).T.contiguous()), moving)

    def move(self, columns: Columns) -> list[bytes]:
        """Adopt new addresses; return the arguments of the zk_patch launches that write them."""
        patches = []
        for k, (old, new) in enumerate(zip(self.known, columns)):
            if new is not None and new != old:
                patches += [self._patch(k, row, new[row : row + PATCH_LENGTH]) for row in self._starts()]
        self.known = columns
        return patches

    def _starts(self) -> range:
        return range(0, len(self.words), PATCH_LENGTH)

    def _patch(self, column: int, row: int, values: list[int]) -> bytes:
        width = self.words.shape[1]
        padding = [0] * (PATCH_LENGTH - len(values))
        return _PATCH.pack(self.words.data_ptr(), row * width + column, width, len(values), *values, *padding)
