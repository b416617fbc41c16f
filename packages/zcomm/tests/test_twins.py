"""Second groups of the same ranks."""

from __future__ import annotations

import torch

import zcomm
from zcomm.testing import run_ranks


def _crosses() -> list[float]:
    other = zcomm.twin()
    first, second = torch.ones(5000), torch.full((5000,), 2.0)
    calls = [(first, None), (second, other)]
    handles = [  # each rank in an order of its own
        zcomm.all_reduce(tensor, group, async_op=True) for tensor, group in calls[:: 1 - 2 * (zcomm.group_rank() % 2)]
    ]
    for handle in handles:
        handle.wait()
    assert zcomm.twin() is other
    return [float(first.mean()), float(second.mean())]


def test_two_groups_of_the_same_ranks_need_no_common_order() -> None:
    assert run_ranks(_crosses, 2) == [[2.0, 4.0]] * 2
    assert run_ranks(_crosses, 4) == [[4.0, 8.0]] * 4


def test_alone_there_is_none() -> None:
    assert zcomm.twin() is None
