"""Arithmetic of addresses: the elements that two regions share, and exact coverage of a tensor by regions.

A tensor is sharded twice.  Tensor and expert parallelism give a rank a box (a hyper-rectangle of the global tensor);
ZeRO then gives it a span, an interval of the flattened box in row-major order.  A Region is the pair, and its
elements in memory are the span's elements in order.

`intersect`: boxes and spans may differ on the two sides of a load in any way, so the result is a list of runs,
ranges that are contiguous on both sides.  The runs of two boxes have one length and two arithmetic progressions per
axis, so numpy computes many rows at once and clips them to the spans.  Both start positions increase with the row, so
bisection finds the relevant rows: the cost is proportional to the result, not to the boxes.
Rejected: gathering the whole tensor and slicing it (needs the memory of the largest tensor); element index arrays
(eight bytes per element, where a run costs 24 per row).

`tiling_problem`: a span is a few boxes (`as_boxes`), and the sum of the indicator functions of boxes equals the
indicator of the whole tensor if and only if their signed corners are equal.  (The mixed difference of the sum is a
signed point at each corner of each box; summing it again restores the function, so no information is lost.)  Dims in
which every box is whole are skipped, so the usual cost is one or two corners per piece.
Rejected: comparing pieces in pairs (n**2 steps: hours for a hostile manifest); counting elements alone (misses a gap
that an overlap compensates).
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

Box: TypeAlias = "tuple[tuple[int, int], ...]"  # (lo, hi) per dim of the global tensor
Span: TypeAlias = "tuple[int, int]"  # [start, stop) of the flattened box
Offsets: TypeAlias = "NDArray[np.int64]"

MAX_NUMEL = 2**62  # every position fits int64, with room for sums
MAX_CORNERS = 1 << 20  # bounds time and memory: one second per tensor; real checkpoints stay far below
_MAX_CUT_DIMS = 8  # each doubles the corners of every box; a small manifest could otherwise take hours
_MAX_SUSPECTS = 400  # regions that the error message compares in pairs


def box_numel(box: Box) -> int:
    """Number of elements of a box; 1 for the box () of a scalar."""
    numel = 1
    for lo, hi in box:
        numel *= hi - lo
    return numel


def whole_box(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


@attrs.frozen(cache_hash=True)
class Region:
    """A part of a global tensor.  Invariant (see `region_problem`): lo <= hi per dim, 0 <= start <= stop <= box."""

    box: Box
    span: Span

    @property
    def numel(self) -> int:
        return self.span[1] - self.span[0]

    def __str__(self) -> str:
        sides = ", ".join(f"{lo}:{hi}" for lo, hi in self.box)
        return f"[{sides}]({self.span[0]}:{self.span[1]})"


def region_problem(shape: tuple[int, ...], region: Region) -> str:
    """Error text if the region cannot be part of a tensor of this shape; "" if it can."""
    if any(size < 0 for size in shape):
        return f"shape {shape} has a negative size"
    if box_numel(whole_box(shape)) > MAX_NUMEL:
        return f"shape {shape} has more than 2**62 elements"
    if len(region.box) != len(shape):
        return f"box {region.box} has {len(region.box)} dims, the tensor {len(shape)}"
    for dim, ((lo, hi), size) in enumerate(zip(region.box, shape)):
        if not 0 <= lo <= hi <= size:
            return f"box side {lo}:{hi} of dim {dim} is outside 0:{size}"
    start, stop = region.span
    if not 0 <= start <= stop <= box_numel(region.box):
        return f"span {start}:{stop} is outside 0:{box_numel(region.box)}, the size of its box"
    return ""


@attrs.frozen(eq=False)
class Runs:
    """Ranges that are contiguous on both sides; all arrays (n,) int64, increasing, in elements."""

    target: Offsets  # start of each in the memory of the wanted region
    source: Offsets  # start of each in the memory of the stored region
    length: Offsets

    def __len__(self) -> int:
        return len(self.length)


def intersect(wanted: Region, stored: Region, *, batch: int = 1 << 16) -> Iterator[Runs]:
    """Runs of the elements that both regions hold, in increasing order, at most `batch` at a time.

    Offsets count from the start of each region's span, the start of its memory.
    """
    (a_start, a_stop), (b_start, b_stop) = wanted.span, stored.span
    if wanted.box == stored.box:  # the usual case, and the one for which numpy is slow
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start < stop:
            yield _one_run(start - a_start, start - b_start, stop - start)
        return
    rows = _common_rows(wanted.box, stored.box)
    if rows is None:
        return

    def begun(row: int) -> bool:
        a, b = rows.at(row)
        return bool(a + rows.length > a_start and b + rows.length > b_start)

    def past(row: int) -> bool:
        a, b = rows.at(row)
        return bool(a >= a_stop or b >= b_stop)

    every = range(rows.count)
    first = bisect.bisect_left(every, True, key=begun)
    last = bisect.bisect_left(every, True, key=past)
    for begin in range(first, last, batch):
        a, b = rows.at(np.arange(begin, min(begin + batch, last), dtype=np.int64))
        a, b = np.broadcast_arrays(a, b)
        head = np.maximum(0, np.maximum(a_start - a, b_start - b))
        length = np.minimum(rows.length, np.minimum(a_stop - a, b_stop - b)) - head
        keep = length > 0
        if keep.any():
            target, source = (a + head - a_start)[keep], (b + head - b_start)[keep]
            yield Runs(target=target, source=source, length=length[keep])


def overlap(one: Region, other: Region) -> bool:
    """True if the two regions have an element in common."""
    if one.box == other.box:
        return max(one.span[0], other.span[0]) < min(one.span[1], other.span[1])
    return next(intersect(one, other, batch=64), None) is not None


def as_boxes(region: Region) -> list[Box]:
    """The region as disjoint boxes: at most two per dim, since only the ends of a span are ragged."""
    return _cut(region.box, *region.span)


def tiling_problem(shape: tuple[int, ...], regions: Sequence[Region]) -> str:
    """Error text if the regions do not cover a tensor of this shape exactly once; "" if they do.

    Each region must be valid for the shape (regions.region_problem) and hold at least one element.
    """
    numel, covered = box_numel(whole_box(shape)), sum(region.numel for region in regions)
    if covered == numel and (len(regions) <= 1 or _same_corners(shape, _boxes(regions))):
        return ""
    pair = _overlapping_pair(regions)
    if pair is not None:
        return f"pieces overlap: {pair[0]} and {pair[1]}"
    if covered < numel:
        return f"pieces cover {covered:,} of {numel:,} elements"
    return f"pieces overlap: {covered:,} elements for {numel:,}"


@attrs.frozen
class _Rows:
    """Intersection of two boxes as rows of one length, numbered row-major over `shape`."""

    shape: tuple[int, ...]  # extents of the dims that rows step through
    length: int  # elements a row has in common on both sides
    target_start: int  # position of row 0 in the flattened wanted box
    source_start: int
    target_strides: tuple[int, ...]  # step of each dim of `shape`
    source_strides: tuple[int, ...]

    @property
    def count(self) -> int:
        return box_numel(whole_box(self.shape))

    def at(self, row: Any) -> tuple[Any, Any]:
        """(target, source) position of a row; an int gives ints, an int64 array gives arrays."""
        target, source = self.target_start, self.source_start
        for size, a, b in zip(self.shape[::-1], self.target_strides[::-1], self.source_strides[::-1]):
            row, index = row // size, row % size
            target, source = target + index * a, source + index * b
        return target, source


def _strides(box: Box) -> tuple[int, ...]:
    return tuple(box_numel(box[dim + 1 :]) for dim in range(len(box)))


def _common_rows(wanted: Box, stored: Box) -> _Rows | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, stored))
    if any(lo >= hi for lo, hi in common):
        return None
    outer, length = len(common), 1
    while outer:  # a row absorbs a dim, and the next one while the dim is whole on both sides
        outer -= 1
        length *= common[outer][1] - common[outer][0]
        if not (common[outer] == wanted[outer] == stored[outer]):
            break
    a, b = _strides(wanted), _strides(stored)
    return _Rows(
        shape=tuple(hi - lo for lo, hi in common[:outer]),
        length=length,
        target_start=sum((lo - start) * step for (lo, _), (start, _), step in zip(common, wanted, a)),
        source_start=sum((lo - start) * step for (lo, _), (start, _), step in zip(common, stored, b)),
        target_strides=a[:outer],
        source_strides=b[:outer],
    )


def _one_run(target: int, source: int, length: int) -> Runs:
    return Runs(
        target=np.array([target], np.int64),
        source=np.array([source], np.int64),
        length=np.array([length], np.int64),
    )


def _cut(box: Box, start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if not box:
        return [()]
    (lo, _), rest = box[0], box[1:]
    step = box_numel(rest)
    first, last = start // step, stop // step
    if start % step == 0 and stop % step == 0:
        return [((lo + first, lo + last), *rest)]
    if first == last:
        return _slice(lo + first, _cut(rest, start - first * step, stop - first * step))
    whole = first + (start % step > 0)
    head = _slice(lo + first, _cut(rest, start % step, step)) if start % step else []
    body: list[Box] = [((lo + whole, lo + last), *rest)] if whole < last else []
    tail = _slice(lo + last, _cut(rest, 0, stop % step)) if stop % step else []
    return head + body + tail


def _slice(index: int, boxes: list[Box]) -> list[Box]:
    return [((index, index + 1), *box) for box in boxes]


def _boxes(regions: Sequence[Region]) -> list[Box]:
    return [box for region in _joined(regions) for box in as_boxes(region)]


def _joined(regions: Sequence[Region]) -> list[Region]:
    """Adjacent spans of one box merged: ZeRO splits a box into many, and the cost is per corner."""
    joined: list[Region] = []
    for region in sorted(regions, key=lambda each: (each.box, each.span)):
        if joined and joined[-1].box == region.box and joined[-1].span[1] == region.span[0]:
            region = Region(region.box, (joined.pop().span[0], region.span[1]))
        joined.append(region)
    return joined


def _same_corners(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    whole = whole_box(shape)
    dims = [dim for dim, side in enumerate(whole) if any(box[dim] != side for box in boxes)]
    if len(dims) > _MAX_CUT_DIMS or len(boxes) << len(dims) > MAX_CORNERS:
        raise ValueError(f"{len(boxes):,} boxes split along {len(dims)} dims are too many to check")
    corners: Counter[tuple[int, ...]] = Counter()
    _add_corners(corners, whole, dims, -1 if box_numel(whole) else 0)
    for box in boxes:
        _add_corners(corners, box, dims, 1)
    return not any(corners.values())


def _add_corners(corners: Counter[tuple[int, ...]], box: Box, dims: list[int], weight: int) -> None:
    for ends in itertools.product((0, 1), repeat=len(dims)):
        corner = tuple(box[dim][end] for dim, end in zip(dims, ends))
        corners[corner] += -weight if sum(ends) % 2 else weight


def _overlapping_pair(regions: Sequence[Region]) -> tuple[Region, Region] | None:
    suspects = sorted(regions, key=lambda each: (each.box, each.span))[:_MAX_SUSPECTS]
    return next((pair for pair in itertools.combinations(suspects, 2) if overlap(*pair)), None)
