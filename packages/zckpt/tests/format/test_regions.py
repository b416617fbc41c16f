"""Oracle: number the elements of a global array, slice it with numpy, and compare the numbers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt.format.regions import Box, Region, as_boxes, box_numel, intersect, overlap, region_problem, whole_box


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    sides = []
    for size in shape:
        ends = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        sides.append((0, size) if draw(st.booleans()) else (ends[0], ends[1]))
    return tuple(sides)


@st.composite
def regions_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    box = draw(boxes_in(shape))
    ends = sorted((draw(st.integers(0, box_numel(box))), draw(st.integers(0, box_numel(box)))))
    span = (0, box_numel(box)) if draw(st.booleans()) else (ends[0], ends[1])
    return Region(box, span)


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def elements(shape: tuple[int, ...], region: Region) -> np.ndarray:
    """The global numbers of a region's elements, in the order of its memory."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    cut = numbers[tuple(slice(lo, hi) for lo, hi in region.box)]
    return cut.reshape(-1)[slice(*region.span)]


@settings(max_examples=200, deadline=None)
@given(st.data(), shapes, st.sampled_from([1, 2, 1 << 16]))
def test_runs_join_exactly_the_elements_that_both_hold(
    data: st.DataObject, shape: tuple[int, ...], batch: int
) -> None:
    wanted, stored = data.draw(regions_in(shape)), data.draw(regions_in(shape))
    mine, theirs = elements(shape, wanted), elements(shape, stored)
    filled = np.full(len(mine), -1)
    for runs in intersect(wanted, stored, batch=batch):
        assert 0 < len(runs) <= batch
        for target, source, length in zip(runs.target, runs.source, runs.length):
            assert length > 0
            assert (filled[target : target + length] == -1).all()
            filled[target : target + length] = theirs[source : source + length]
    assert np.array_equal(filled, np.where(np.isin(mine, theirs), mine, -1))
    assert overlap(wanted, stored) == bool(np.isin(mine, theirs).any())


@settings(max_examples=100, deadline=None)
@given(st.data(), shapes)
def test_runs_rise_on_both_sides(data: st.DataObject, shape: tuple[int, ...]) -> None:
    for runs in intersect(data.draw(regions_in(shape)), data.draw(regions_in(shape))):
        assert (np.diff(runs.target) > 0).all()
        assert (np.diff(runs.source) > 0).all()


@settings(max_examples=200, deadline=None)
@given(st.data(), shapes)
def test_a_region_is_the_disjoint_union_of_a_few_boxes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    region = data.draw(regions_in(shape))
    boxes = as_boxes(region)
    parts = [elements(shape, Region(box, (0, box_numel(box)))) for box in boxes]
    assert sorted(np.concatenate([*parts, []]).tolist()) == sorted(elements(shape, region).tolist())
    assert len(boxes) <= max(1, 2 * len(shape))


def test_equal_boxes_give_one_run_whatever_their_size() -> None:
    box = ((0, 2**30), (0, 2**30))
    (runs,) = intersect(Region(box, (10, 2**60)), Region(box, (2**59, 2**59 + 7)))
    assert (runs.target.tolist(), runs.source.tolist(), runs.length.tolist()) == ([2**59 - 10], [0], [7])


def test_the_cost_follows_the_answer_and_not_the_boxes() -> None:
    shape = (2**40, 8)
    wanted = Region(((0, 2**40), (0, 4)), (4 * 10**9, 4 * 10**9 + 8))
    (runs,) = intersect(wanted, Region(whole_box(shape), (0, 2**43)))
    assert runs.source.tolist() == [8 * 10**9, 8 * 10**9 + 8]


def test_a_scalar_is_one_run_of_one_element() -> None:
    (runs,) = intersect(Region((), (0, 1)), Region((), (0, 1)))
    assert (runs.target.tolist(), runs.source.tolist(), runs.length.tolist()) == ([0], [0], [1])
    assert list(intersect(Region((), (0, 1)), Region((), (1, 1)))) == []


@pytest.mark.parametrize(
    ("shape", "region", "words"),
    [
        ((-1,), Region(((0, 0),), (0, 0)), "negative"),
        ((2**40, 2**40), Region(((0, 1), (0, 1)), (0, 1)), r"more than 2\*\*62"),
        ((2, 3), Region(((0, 2),), (0, 2)), "1 dims, the tensor 2"),
        ((2, 3), Region(((0, 2), (1, 4)), (0, 2)), "side 1:4 of dim 1 is outside 0:3"),
        ((2, 3), Region(((2, 1), (0, 3)), (0, 0)), "side 2:1 of dim 0"),
        ((2, 3), Region(((0, 2), (0, 3)), (0, 7)), "span 0:7 is outside 0:6"),
        ((2, 3), Region(((0, 2), (0, 3)), (4, 3)), "span 4:3"),
        ((), Region((), (0, 1)), ""),
        ((0, 3), Region(((0, 0), (0, 3)), (0, 0)), ""),
    ],
)
def test_a_region_that_is_no_part_of_its_tensor_is_told_why(
    shape: tuple[int, ...], region: Region, words: str
) -> None:
    import re

    assert re.search(words, region_problem(shape, region))
    assert bool(words) == bool(region_problem(shape, region))
