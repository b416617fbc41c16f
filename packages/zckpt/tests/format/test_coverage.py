"""The oracle counts how often each element is covered."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt.format.regions import Box, Region, box_numel, tiling_problem, whole_box


def count(shape: tuple[int, ...], regions: list[Region]) -> np.ndarray:
    covered = np.zeros(shape, dtype=np.int64)
    for region in regions:
        cut = covered[(*(slice(lo, hi) for lo, hi in region.box), ...)]
        part = np.zeros(cut.size, dtype=np.int64)
        part[slice(*region.span)] = 1
        cut += part.reshape(cut.shape)
    return covered


def cut_up(box: Box, random_: random.Random, depth: int) -> list[Region]:
    """A random exact tiling: boxes cut in two along a dim, and in the end into spans."""
    longest = [dim for dim, (lo, hi) in enumerate(box) if hi - lo > 1]
    if depth and longest and random_.random() < 0.8:
        dim = random_.choice(longest)
        at = random_.randint(box[dim][0] + 1, box[dim][1] - 1)
        left, right = list(box), list(box)
        left[dim], right[dim] = (box[dim][0], at), (at, box[dim][1])
        return cut_up(tuple(left), random_, depth - 1) + cut_up(tuple(right), random_, depth - 1)
    ends = sorted({0, box_numel(box), *(random_.randint(0, box_numel(box)) for _ in range(random_.randint(0, 2)))})
    return [Region(box, span) for span in itertools.pairwise(ends)]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.integers(0, 10**9), st.booleans())
def test_the_proof_agrees_with_counting(shape: tuple[int, ...], seed: int, spoil: bool) -> None:
    random_ = random.Random(seed)
    regions = cut_up(whole_box(shape), random_, 4)
    assert tiling_problem(shape, regions) == ""
    if spoil:
        at = random_.randrange(len(regions))
        other = random_.choice(cut_up(whole_box(shape), random_, 3))
        regions[at] = other
        random_.shuffle(regions)
        assert (tiling_problem(shape, regions) == "") == bool((count(shape, regions) == 1).all())


def test_a_gap_that_an_overlap_makes_good_in_number_is_found() -> None:
    shape = (4, 4)
    regions = [Region(((0, 2), (0, 4)), (0, 8)), Region(((1, 3), (0, 4)), (0, 8))]
    assert sum(region.numel for region in regions) == math.prod(shape)
    assert "pieces overlap: [0:2, 0:4](0:8) and [1:3, 0:4](0:8)" in tiling_problem(shape, regions)


def test_messages_name_what_is_wrong() -> None:
    half = Region(((0, 4),), (0, 2))
    assert tiling_problem((4,), [half]) == "pieces cover 2 of 4 elements"
    assert tiling_problem((4,), []) == "pieces cover 0 of 4 elements"
    assert "overlap" in tiling_problem((4,), [half, Region(((0, 4),), (1, 4))])


def test_empty_tensors_and_scalars() -> None:
    assert tiling_problem((0, 3), []) == ""
    assert tiling_problem((), [Region((), (0, 1))]) == ""
    assert tiling_problem((), []) == "pieces cover 0 of 1 elements"


def test_many_pieces_cost_little() -> None:
    n = 20_000
    assert tiling_problem((n, 3), [Region(((i, i + 1), (0, 3)), (0, 3)) for i in range(n)]) == ""
    assert tiling_problem((n, 3), [Region(((0, n), (0, 3)), (3 * i, 3 * i + 3)) for i in range(n)]) == ""


@pytest.mark.parametrize("dims", [17, 40])
def test_a_forged_number_of_dims_is_refused_before_it_costs(dims: int) -> None:
    """With 17 of them, two pieces would take a gigabyte to check."""
    whole, corner = tuple((0, 2) for _ in range(dims)), tuple((0, 1) for _ in range(dims))
    with pytest.raises(ValueError, match="too many to check"):
        tiling_problem((2,) * dims, [Region(corner, (0, 1)), Region(whole, (1, 2**dims))])


def test_a_manifest_of_few_bytes_cannot_ask_for_hours() -> None:
    shape = (2,) * 18
    whole = whole_box(shape)
    with pytest.raises(ValueError, match="too many to check"):
        tiling_problem(shape, [Region(whole, (0, 2**18 - 1)), Region(((1, 2),) * 18, (0, 1))])
