"""Where tensors lie in a flat shard, for optimizers that have to know what a tensor is (LAMB, Muon)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
from torch import Tensor

__all__ = ["Segment"]


@attrs.frozen
class Segment:
    """A tensor, or the part of one, in a flat shard: elements [start, start + numel).

    Raises ValueError for a negative start or size.
    """

    start: int
    shape: tuple[int, ...] = attrs.field(converter=tuple)  # of a whole tensor; (numel,) of one that is cut
    index: int = 0  # which tensor of the model it is

    def __attrs_post_init__(self) -> None:
        if self.start < 0 or any(size < 0 for size in self.shape):
            raise ValueError(f"{self} has a negative start or shape; both count elements, from 0 on.")

    @property
    def numel(self) -> int:
        """Elements that it covers."""
        return math.prod(self.shape)

    @property
    def row(self) -> slice:
        """The elements that it covers."""
        return slice(self.start, self.start + self.numel)

    @staticmethod
    def check(segments: Sequence[Segment], shard: Tensor) -> None:
        """ValueError unless `segments` are disjoint parts of `shard`, which is flat and contiguous."""
        if shard.dim() != 1 or not shard.is_contiguous():
            raise ValueError(f"a shard has shape {tuple(shard.shape)}; segments need a flat contiguous tensor.")
        end = 0
        for segment in sorted(segments, key=lambda found: found.start):
            if segment.start < end:
                raise ValueError(
                    f"{segment} begins before {end}, where the one before it ends; segments are disjoint."
                )
            end = segment.start + segment.numel
        if end > shard.numel():
            raise ValueError(f"segments reach to element {end}; the shard has {shard.numel()} elements.")
