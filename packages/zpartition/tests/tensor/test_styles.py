"""Splits cover every element once and keep units whole."""

from __future__ import annotations

import itertools

import pytest
import torch

from zpartition.layout.address import Address
from zpartition.tensor.styles import split_along, unit_ranges


@pytest.mark.parametrize(("units", "ranks"), list(itertools.product([1, 2, 3, 7, 12], [1, 2, 3, 5])))
def test_unit_ranges_cover_all_units_and_differ_by_at_most_one(units: int, ranks: int) -> None:
    found = unit_ranges(units, ranks)
    assert [lo for lo, _ in found] == [0, *(hi for _, hi in found)][:-1]
    assert found[-1][1] == units
    sizes = [hi - lo for lo, hi in found]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("dim", "blocks"), [(0, ()), (1, ()), (0, (12, 6, 6))])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_of_all_ranks_cover_the_tensor(dim: int, blocks: tuple[int, ...], ranks: int) -> None:
    shape = (24, 6)
    seen = torch.zeros(shape)
    for share in unit_ranges(6, ranks):
        address = split_along(shape, dim, 6, share, blocks)
        for box in address.boxes:
            seen[tuple(slice(lo, hi) for lo, hi in box)] += 1
        assert torch.Size(address.shape).numel() == 144 * (share[1] - share[0]) // 6
    assert bool((seen == 1).all())


def test_adjacent_blocks_are_one_box() -> None:
    assert split_along((24, 6), 0, 6, (0, 6), (12, 6, 6)) == Address((24, 6), (((0, 24), (0, 6)),))
