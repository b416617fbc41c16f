"""Ragged rows delivered by key, through shared memory and over Gloo; sparse rows gathered by every rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import zcomm
from zcomm.shared import native
from zcomm.testing import RankFailed, run_ranks

COUNTS = [
    [[2, 0], [1, 1], [0, 0]],
    [[0, 3], [1, 0], [2, 2]],
    [[1, 1], [0, 0], [0, 4]],
]  # [from][to][key]


def named_rows(counts: Sequence[Sequence[Sequence[int]]], width: int, dtype: torch.dtype) -> list[list[list[Tensor]]]:
    """[from][to][key]: (rows, width), neighbours with different numbers."""
    numbers = itertools.cycle(range(251))

    def rows(count: int) -> Tensor:
        return torch.tensor([[float(next(numbers))] for _ in range(count)]).reshape(count, 1).expand(-1, width)

    return [[[rows(count).to(dtype) for count in runs] for runs in row] for row in counts]


def rank_exchanges_rows(transport: str) -> None:
    """Send the rows of COUNTS, and of random tables with many chunks, and return them."""
    rank, size = zcomm.group_rank(), zcomm.group_size()
    draw = random.Random(7)
    tables = [(COUNTS, 1), (COUNTS, 5)]
    for keys in (1, 3):
        tables.append(([[[draw.randrange(60) for _ in range(keys)] for _ in range(size)] for _ in range(size)], 2000))
    lonely = [[[int(r == s == 1) * 300] for s in range(size)] for r in range(size)]  # all stays where it is
    tables += [(lonely, 2000), ([[[0, 0]] * size] * size, 3)]
    for counts, width in tables:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            rows = named_rows(counts, width, dtype)
            keys = len(counts[0][0])
            given = torch.cat([rows[rank][s][k] for s in range(size) for k in range(keys)])
            by_key = torch.cat([rows[r][rank][k] for k in range(keys) for r in range(size)])
            found = zcomm.all_to_all_ragged_rows(given, counts, label="rows")
            assert found.dtype == dtype
            assert found.equal(by_key)
            assert zcomm.return_ragged_rows(found, counts).equal(given)
    assert zcomm.transport() == transport


@pytest.mark.parametrize(("choice", "transport"), [("shared", "shared memory"), ("gloo", "gloo")])
def test_rows_arrive_by_key_and_go_back_where_they_were(
    choice: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice == "shared" and native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    monkeypatch.setenv("ZCOMM_TRANSPORT", choice)
    run_ranks(rank_exchanges_rows, 3, transport)


def rank_has_another_table() -> None:
    counts = [[[1], [1]], [[1], [1]]]
    if zcomm.group_rank():
        counts[0][0], counts[0][1] = [2], [0]  # as many rows in all, and this rank sends what it should
    zcomm.all_to_all_ragged_rows(torch.ones(2, 4), counts, label="rows")


@pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())
def test_ranks_with_different_tables_raise() -> None:
    with pytest.raises(RankFailed, match=r"all_to_all_v 'rows' of 4 float32 at most \(table [0-9a-f]{8}\)"):
        run_ranks(rank_has_another_table, 2)


def test_alone_rows_are_a_copy_of_their_own() -> None:
    given = torch.arange(6.0).view(3, 2)
    for collective in (zcomm.all_to_all_ragged_rows, zcomm.return_ragged_rows):
        found = collective(given, [[[1, 2]]])
        assert found.equal(given)
        assert found.data_ptr() != given.data_ptr()


def test_mismatched_arguments_are_rejected_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"all_to_all_ragged_rows 'rows': counts has 1 x \[2\] x \[1\] numbers; there are 1"
    ):
        zcomm.all_to_all_ragged_rows(torch.zeros(3, 1), [[[1], [2]]], label="rows")
    with pytest.raises(ValueError, match=r"counts has 2 x \[0, 1\] x \[0\] numbers"):
        zcomm.return_ragged_rows(torch.zeros(1, 1), [[[]], []], label="rows")
    with pytest.raises(
        ValueError, match=r"return_ragged_rows: input has shape \[3, 1\]; rank 0 sends \[\[4\]\] rows, so it "
    ):
        zcomm.return_ragged_rows(torch.zeros(3, 1), [[[4]]])
    for collective in (zcomm.all_to_all_ragged_rows, zcomm.return_ragged_rows):
        with pytest.raises(ValueError, match=r"_rows 'rows': a count is -1; counts must be 0 or more"):
            collective(torch.zeros(2, 1), [[[-1, 3]]], label="rows")


def rank_gathers_rows(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rank = zcomm.group_rank()
    indices = torch.arange(2 * rank)  # none on rank 0
    return zcomm.gather_rows(indices, torch.full((2 * rank, 3), float(rank), dtype=dtype), label="rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_all_rows_in_the_order_of_the_ranks(world_size: int, dtype: torch.dtype) -> None:
    for found in run_ranks(rank_gathers_rows, world_size, dtype):
        assert len(found) == world_size
        for rank, (indices, values) in enumerate(found):
            assert indices.tolist() == list(range(2 * rank))
            assert torch.equal(values, torch.full((2 * rank, 3), float(rank), dtype=dtype))


def test_rows_that_do_not_fit_together_are_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"gather_rows\('x'\): indices are torch.int64 of shape \[2\], values .* \[3, 4\]"
    ):
        zcomm.gather_rows(torch.arange(2), torch.zeros(3, 4), label="x")
