from __future__ import annotations

from typing import Any

import pytest
import torch

from zoptim.backends.contract import Streams
from zoptim.backends.gpu.tables import Table, columns_of, make_items

CPU = torch.device("cpu")


def test_items_cut_every_row_into_chunks_in_order() -> None:
    items, first = make_items([5, 0, 20, 10], 10, CPU)
    assert items.tolist() == [[0, 0], [2, 0], [2, 1], [3, 0]]
    assert items.dtype is torch.int32
    assert first == [0, 1, 1, 3]


def test_no_rows_with_elements_make_no_items() -> None:
    items, first = make_items([0, 0], 10, CPU)
    assert items.shape == (0, 2)
    assert first == [0, 0]


def test_columns_follow_the_row_of_the_c_text() -> None:
    tensors = [torch.ones(1) for _ in range(9)]
    w, g, r, c, s0, s1, q0, q1, step = ([tensor] for tensor in tensors)
    streams = Streams(weights=w, grads=g, states=(s0, s1), scales=(q0, q1), remainders=r, copies=c, steps=step)
    at = [[tensor.data_ptr()] for tensor in tensors]
    assert columns_of(streams) == [*at[:6], None, at[6], at[7], None, at[8]]


def test_a_table_is_its_columns_side_by_side() -> None:
    table = Table.make([[1, 2], None], [[7, 8]], CPU)
    assert table.words.tolist() == [[1, 0, 7], [2, 0, 8]]


def test_only_columns_that_moved_are_written() -> None:
    table = Table.make([[1, 2], [3, 4], None], [[7, 8]], CPU)
    assert table.move([[1, 2], [3, 4], None]) == []
    (patch,) = table.move([[1, 2], [3, 5], None])
    words = memoryview(patch).cast("Q")
    assert words[:6].tolist() == [table.words.data_ptr(), 1, 4, 2, 3, 5]
    assert table.move([[1, 2], [3, 5], None]) == []


@pytest.mark.parametrize(("num_rows", "num_patches"), [(480, 1), (481, 2), (960, 2)])
def test_a_launch_carries_480_addresses(num_rows: int, num_patches: int) -> None:
    table = Table.make([[0] * num_rows], [[0] * num_rows], CPU)
    patches = table.move([list(range(1, num_rows + 1))])
    counts: list[Any] = [memoryview(patch).cast("Q")[3] for patch in patches]
    assert len(patches) == num_patches
    assert sum(counts) == num_rows
    assert all(len(patch) <= 4096 for patch in patches), "CUDA's limit for the arguments of a kernel"
