"""Rows from every rank to every rank."""

from __future__ import annotations

import pytest
import torch

import zcomm
from zcomm.testing import run_ranks


def _gathers(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rank = zcomm.group_rank()
    indices = torch.arange(2 * rank)  # none on rank 0
    return zcomm.gather_rows(indices, torch.full((2 * rank, 3), float(rank), dtype=dtype), label="rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_all_rows_in_the_order_of_the_ranks(world_size: int, dtype: torch.dtype) -> None:
    for found in run_ranks(_gathers, world_size, dtype):
        assert len(found) == world_size
        for rank, (indices, values) in enumerate(found):
            assert indices.tolist() == list(range(2 * rank))
            assert torch.equal(values, torch.full((2 * rank, 3), float(rank), dtype=dtype))


def test_rows_that_do_not_fit_together_are_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"gather_rows\('x'\): indices are torch.int64 of shape \[2\], values .* \[3, 4\]"
    ):
        zcomm.gather_rows(torch.arange(2), torch.zeros(3, 4), label="x")
