"""Argument checks, without a group."""

from __future__ import annotations

import pytest
import torch

from zcomm.collectives import checks


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_own_slice_and_memory_apart_both_fit(rank: int) -> None:
    large = torch.zeros(6)
    checks.flat_pair("reduce_scatter", "", large[2 * rank : 2 * rank + 2], large, size=3, rank=rank)
    checks.flat_pair("all_gather", "", large, torch.zeros(2), size=3, rank=rank)


def test_neighbours_in_one_storage_do_not_overlap() -> None:
    storage = torch.zeros(8)
    checks.flat_pair("all_gather", "", storage[2:6], storage[0:2], size=2, rank=0)
    checks.flat_pair("all_gather", "", storage[2:6], storage[6:8], size=2, rank=0)


@pytest.mark.parametrize("begin", [1, 3, 5])
def test_any_partial_overlap_is_rejected(begin: int) -> None:
    storage = torch.zeros(8)
    with pytest.raises(ValueError, match="may share its memory"):
        checks.flat_pair("all_gather", "w", storage[2:6], storage[begin : begin + 2], size=2, rank=0)


def test_the_equation_is_printed_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"over 4 ranks input must have 3 x 4 = 12 elements"):
        checks.flat_pair("reduce_scatter", "", torch.zeros(3), torch.zeros(10), size=4, rank=0)
