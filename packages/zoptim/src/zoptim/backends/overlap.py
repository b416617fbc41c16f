"""Overlap of the tensors of one step: a kernel must not read or write memory that another of its streams writes."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Sequence

import attrs
from torch import Tensor

from zoptim.backends import native
from zoptim.backends.layouts import addresses, num_bytes

__all__ = ["WrittenRanges"]


@attrs.define(eq=False)
class WrittenRanges:
    """The memory that a step writes, sorted, to tell whether anything else lies in it.

    Invariant: ranges are disjoint.  `make` returns the position of a list and a tensor in it that overlaps another
    tensor instead, where there is one.
    """

    starts: array[int]
    ends: array[int]

    @classmethod
    def make(cls, lists: Sequence[Sequence[Tensor]], steps: Sequence[Tensor] = ()) -> WrittenRanges | tuple[int, int]:
        """Empty tensors have no range; neighbours in `steps` may be one tensor, the count of both."""
        found = []
        for which, tensors in enumerate([*lists, steps]):
            seen = None
            for position, (start, size) in enumerate(zip(addresses(tensors), num_bytes(tensors))):
                if size and tensors[position] is not seen:
                    found.append((start, start + size, which, position))
                seen = tensors[position] if tensors is steps else None
        found.sort()
        for before, after in itertools.pairwise(found):
            if after[0] < before[1]:
                return after[2:]
        return cls(array("Q", [f[0] for f in found]), array("Q", [f[1] for f in found]))

    def find(self, starts: Sequence[int], sizes: array[int]) -> int | None:
        """The index of the first of other ranges, which begin at `starts` and have `sizes` bytes, that overlaps
        one."""
        library = native.library()
        if library is not None:
            view = library.ffi.from_buffer
            index = library.lib.zk_find_overlap(
                len(self.starts), view("uint64_t[]", self.starts), view("uint64_t[]", self.ends),
                len(starts), view("uint64_t[]", array("Q", starts)), view("int64_t[]", sizes),
            )  # fmt: skip
            return None if index < 0 else int(index)
        for index, (start, size) in enumerate(zip(starts, sizes)):
            after = bisect.bisect_right(self.ends, start)
            if size and after < len(self.starts) and self.starts[after] < start + size:
                return index
        return None
