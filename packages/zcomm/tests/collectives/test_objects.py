"""all_gather_object(): JSON values of every rank on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import zcomm
from zcomm.testing import recorded, run_ranks


def rank_exchanges() -> list[Any]:
    rank = dist.get_rank()
    values = [{"rank": rank, "text": "é" * rank, "nothing": None}, [1.5] * (100 * rank), "", -(2**60) - rank]
    return [zcomm.all_gather_object(value) for value in values]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_receives_every_value_in_rank_order(world_size: int) -> None:
    ranks = range(world_size)
    expected = [
        [{"rank": r, "text": "é" * r, "nothing": None} for r in ranks],
        [[1.5] * (100 * r) for r in ranks],
        ["" for _ in ranks],
        [-(2**60) - r for r in ranks],
    ]
    assert run_ranks(rank_exchanges, world_size) == [expected] * world_size


def test_alone_the_value_makes_the_round_trip_through_json_too() -> None:
    assert zcomm.all_gather_object({"shape": (2, 3), 1: True}) == [{"shape": [2, 3], "1": True}]


def test_alone_a_value_that_is_not_json_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"all_gather_object: set is not JSON: .*Use None, bool, int"):
        zcomm.all_gather_object({1, 2})


def rank_sends_a_set() -> str:
    with pytest.raises(TypeError) as caught:
        zcomm.all_gather_object({1} if dist.get_rank() == 1 else [1])
    assert zcomm.all_gather_object("still usable") == ["still usable"] * 2
    return str(caught.value)


def test_one_bad_value_raises_on_all_ranks_and_leaves_none_waiting() -> None:
    innocent, guilty = run_ranks(rank_sends_a_set, 2)
    assert "another rank's value is not JSON" in innocent
    assert "rejected: rank 1 of 2; this is rank 0" in innocent
    assert "set is not JSON" in guilty


def rank_counts() -> list[str]:
    with recorded() as communication:
        zcomm.all_gather_object([1])
    return communication.ops


def test_all_gather_object_is_two_gathers() -> None:
    assert run_ranks(rank_counts, 2) == [["all_gather", "all_gather"]] * 2
