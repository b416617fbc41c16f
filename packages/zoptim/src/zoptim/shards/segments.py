"""Segments: positions of tensors in flat shards, for optimizers that need whole tensors (LAMB, Muon, Adafactor)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import attrs
from torch import Tensor

__all__ = ["Segment", "SegmentLike"]


class SegmentLike(Protocol):
    """The interface of a segment; zpartition has its own class.  The fields are those of `Segment`."""

    @property
    def start(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def index(self) -> int: ...
    @property
    def span(self) -> tuple[int, int] | None: ...


def _tuple(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sizes)


@attrs.frozen
class Segment:
    """A tensor, or a part of one, in a flat shard: elements [start, start + numel).

    Raises ValueError for a negative start or size, and for a span that is not inside the tensor.
    """

    start: int
    shape: tuple[int, ...] = attrs.field(converter=_tuple)  # of the whole tensor
    index: int = 0  # of the tensor in the model
    span: tuple[int, int] | None = None  # [lo, hi) of the flattened tensor in this shard; None: all of it

    def __attrs_post_init__(self) -> None:
        if self.start < 0 or any(size < 0 for size in self.shape):
            raise ValueError(f"{self} has a negative start or shape; both must be >= 0.")
        if self.span is not None and not 0 <= self.span[0] <= self.span[1] <= math.prod(self.shape):
            raise ValueError(f"{self} has a span outside of its tensor, which has {math.prod(self.shape)} elements.")

    @classmethod
    def of(cls, other: SegmentLike) -> Segment:
        """Convert to this class."""
        return cls(other.start, other.shape, other.index, other.span)

    @property
    def range(self) -> tuple[int, int]:
        """[lo, hi) of the flattened tensor in this shard."""
        return (0, math.prod(self.shape)) if self.span is None else self.span

    @property
    def is_whole(self) -> bool:
        """Return whether the shard has all of the tensor."""
        return self.range == (0, math.prod(self.shape))

    @property
    def numel(self) -> int:
        """The number of elements in this shard."""
        lo, hi = self.range
        return hi - lo

    @property
    def row(self) -> slice:
        """The elements of the shard."""
        return slice(self.start, self.start + self.numel)

    @staticmethod
    def check(segments: Sequence[Segment], shard: Tensor) -> None:
        """Raise ValueError unless `shard` is flat and contiguous and `segments` are disjoint parts of it."""
        if shard.dim() != 1 or not shard.is_contiguous():
            raise ValueError(f"a shard has shape {tuple(shard.shape)}; segments need a flat contiguous tensor.")
        end = 0
        for segment in sorted(segments, key=lambda found: found.start):
            if segment.start < end:
                raise ValueError(
                    f"{segment} begins before {end}, the end of the previous segment; segments must be disjoint."
                )
            end = segment.start + segment.numel
        if end > shard.numel():
            raise ValueError(f"segments end at element {end}; the shard has {shard.numel()} elements.")

    @staticmethod
    def check_whole(segments: Mapping[Tensor, Sequence[Segment]]) -> None:
        """Raise ValueError for a part of a tensor: cut tensors need the segments of all ranks."""
        for segment in (segment for parts in segments.values() for segment in parts):
            if not segment.is_whole:
                raise ValueError(
                    f"{segment} is a part of a tensor; give the segments of all ranks with place_on_ranks."
                )
