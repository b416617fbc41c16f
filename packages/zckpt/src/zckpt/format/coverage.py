"""Exact check that the pieces of a tensor cover each element exactly once.

Comparing pieces in pairs takes n**2 steps, which a hostile manifest could turn into hours.  Counting elements alone
misses a gap that an overlap compensates.  The check used here is exact and linear: a span is a few boxes
(regions.as_boxes), and the sum of the indicator functions of boxes equals the indicator of the whole tensor if and
only if their signed corners are equal.  (The mixed difference of the sum is a signed point at each corner of each
box; summing it again gives the function back, so no information is lost.)  Dims in which every box is whole are
skipped, so the usual cost is one or two corners per piece.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from zckpt.format.regions import Box, Region, as_boxes, box_numel, overlap, whole_box

MAX_CORNERS = 1 << 20  # bounds time and memory: one second per tensor; real checkpoints stay far below
_MAX_CUT_DIMS = 8  # each doubles the corners of every box; a small manifest could otherwise take hours
_MAX_SUSPECTS = 400  # regions that the error message compares in pairs


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
