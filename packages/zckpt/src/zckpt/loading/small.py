"""Small tensors, read many at once.

Problem.  A model may have tens of thousands of biases, norms and step counts.  A read, a window and a copy for each
cost a hundred times more than their bytes.

Design.  A tensor of at most 64 KiB that is wanted as it is stored, one piece, joins a `Batch`: neighbours in a file,
read by one call, each verified with its own checksums, and copied from one buffer.  Everything else goes
through copy.py.  A batch fits a core's cache.

Rejected: scattering the read into the tensors (preadv): an address for each tensor costs as much as its copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import attrs
import torch
from torch import Tensor

from zckpt.format.manifest import Piece
from zckpt.loading.plan_reads import ReadItem

SMALL_NBYTES = 64 << 10  # largest piece that joins a batch
_BATCH_NBYTES = 512 << 10
_GAP_NBYTES = 1 << 10  # largest gap in a batch that is read and discarded


@attrs.frozen
class Batch:
    """Wanted pieces of one file, in the order of their offsets."""

    file: str
    items: tuple[ReadItem, ...]
    pieces: tuple[Piece, ...]  # one for each item

    @property
    def extent(self) -> tuple[int, int]:
        """First and last byte in the file."""
        return self.pieces[0].offset, self.pieces[-1].offset + self.pieces[-1].nbytes

    def fill(self, data: Tensor) -> None:
        """Copy the bytes of the extent, (n,) uint8 on the CPU, into the tensors of the items."""
        low = self.pieces[0].offset
        for first, last in self._stretches():
            items, dtype = self.items[first:last], self.items[first].entry.dtype
            begin, stop = self.pieces[first].offset - low, self.pieces[last - 1].offset + self.pieces[last - 1].nbytes
            values = data[begin : stop - low]
            values = (values if begin % dtype.itemsize == 0 else values.clone()).view(dtype)
            values = values.to(items[0].shard.tensor.device)
            with torch.no_grad():
                for item, source in zip(items, torch.split(values, [item.region.numel for item in items])):
                    item.shard.tensor.copy_(source)

    def _stretches(self) -> Iterator[tuple[int, int]]:
        """Items of one dtype and device whose bytes touch: [first, last)."""
        first = 0
        kinds = [(item.entry.dtype, item.shard.tensor.device) for item in self.items]
        for i in range(1, len(kinds) + 1):
            if i == len(kinds) or kinds[i] != kinds[first] or not _touch(self.pieces[i - 1], self.pieces[i]):
                yield first, i
                first = i


def find_batches(items: Iterable[ReadItem]) -> tuple[list[Batch], list[ReadItem]]:
    """The batches of the small tensors, and the other items."""
    small: dict[str, list[tuple[int, ReadItem]]] = defaultdict(list)
    others = []
    for item in items:
        pieces = item.pieces
        if len(pieces) == 1 and pieces[0].nbytes <= SMALL_NBYTES and pieces[0].region == item.region:
            small[pieces[0].file].append((pieces[0].offset, item))
        else:
            others.append(item)
    return [batch for file, found in small.items() for batch in _batches(file, found)], others


def _batches(file: str, found: list[tuple[int, ReadItem]]) -> Iterator[Batch]:
    ordered = [item for _, item in sorted(found, key=lambda each: each[0])]
    first = 0
    for i in range(1, len(ordered) + 1):
        if i < len(ordered):
            start, before, here = ordered[first].pieces[0].offset, ordered[i - 1].pieces[0], ordered[i].pieces[0]
            gap = here.offset - before.offset - before.nbytes
            if gap <= _GAP_NBYTES and here.offset + here.nbytes - start <= _BATCH_NBYTES:
                continue
        chosen = tuple(ordered[first:i])
        yield Batch(file, chosen, tuple(item.pieces[0] for item in chosen))
        first = i


def _touch(before: Piece, after: Piece) -> bool:
    return before.offset + before.nbytes == after.offset
