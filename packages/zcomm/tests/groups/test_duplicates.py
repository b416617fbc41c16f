"""Derived groups: duplicate, consecutive and strided ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm import compat
from zcomm.testing import run_ranks


def _crosses() -> list[float]:
    other = zcomm.duplicate_group()
    first, second = torch.ones(5000), torch.full((5000,), 2.0)
    calls = [(first, None), (second, other)]
    handles = [  # each rank in an order of its own
        zcomm.all_reduce(tensor, group, async_op=True) for tensor, group in calls[:: 1 - 2 * (zcomm.group_rank() % 2)]
    ]
    for handle in handles:
        handle.wait()
    assert zcomm.duplicate_group() is other
    return [float(first.mean()), float(second.mean())]


def test_two_groups_of_the_same_ranks_need_no_common_order() -> None:
    assert run_ranks(_crosses, 2) == [[2.0, 4.0]] * 2
    assert run_ranks(_crosses, 4) == [[4.0, 8.0]] * 4


def test_alone_there_is_none() -> None:
    assert zcomm.duplicate_group() is None


def _sums() -> list[object]:
    rank, world = zcomm.group_rank(), zcomm.group_size()
    found: list[object] = []
    for size in (1, 2, world):
        inner, across = zcomm.consecutive_group(size), zcomm.strided_group(size)
        sums = []
        for group in (inner, across, zcomm.duplicate_group(inner)):
            value = torch.tensor([10.0**rank])
            zcomm.all_reduce(value, group)
            sums.append(int(value))
        found.append((zcomm.group_size(inner), zcomm.group_size(across), *sums))
        assert zcomm.consecutive_group(size) is inner
        assert zcomm.strided_group(size) is across
    half = zcomm.consecutive_group(2)
    assert zcomm.group_size(zcomm.consecutive_group(1, half)) == 1
    assert zcomm.consecutive_group(2, half) is half
    with pytest.raises(ValueError, match=r"parts of 3 ranks do not fill a group of 4: choose one of 1, 2, 4\."):
        zcomm.consecutive_group(3)
    return found


def test_consecutive_and_strided_groups_cut_a_group_both_ways() -> None:
    found = run_ranks(_sums, 4)
    assert found[0] == [(1, 4, 1, 1111, 1111), (2, 2, 11, 101, 11), (4, 1, 1111, 1, 1111)]
    assert found[3] == [(1, 4, 1000, 1111, 1111), (2, 2, 1100, 1010, 1100), (4, 1, 1111, 1000, 1111)]


def _orders() -> list[list[int]]:
    """Return the ranks of derived groups of groups whose ranks do not ascend."""
    rank = dist.get_rank()
    everyone = dist.new_group([3, 1, 0, 2], sort_ranks=False)
    made = [zcomm.duplicate_group(everyone), zcomm.consecutive_group(2, everyone), zcomm.strided_group(2, everyone)]
    made += [zcomm.duplicate_group(made[1]), zcomm.duplicate_group(zcomm.strided_group(2, everyone))]
    some = dist.new_group([2, 0, 1], sort_ranks=False)
    if rank != 3:
        made.append(zcomm.duplicate_group(some))
    whole = torch.empty(4)
    zcomm.all_gather(whole, torch.tensor([float(rank)]), made[0])
    assert whole.tolist() == [3.0, 1.0, 0.0, 2.0]
    total = torch.tensor([10.0**rank])
    zcomm.all_reduce(total, made[3])
    assert total.item() == sum(10.0**other for other in dist.get_process_group_ranks(made[3]))
    return [dist.get_process_group_ranks(group) for group in made]


@pytest.mark.skipif(not compat._KEEPS_ORDER, reason="this torch sorts the ranks of a group")
def test_all_keep_the_order_of_the_ranks() -> None:
    found = run_ranks(_orders, 4)
    assert found[0] == [[3, 1, 0, 2], [0, 2], [3, 0], [0, 2], [3, 0], [2, 0, 1]]
    assert found[3] == [[3, 1, 0, 2], [3, 1], [3, 0], [3, 1], [3, 0]]


def test_where_torch_would_sort_the_ranks_an_order_of_their_own_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_KEEPS_ORDER", False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(ValueError, match=r"cannot be made of ranks \[3, 1\] in this order: torch .* sorts them"):
        compat.new_group([3, 1])


def duplicates_for_hosts() -> tuple[bool, str, list[int]]:
    made = zcomm.duplicate_host_group()
    again = zcomm.duplicate_host_group()
    assert made is not None
    found = torch.full((1,), dist.get_rank(made) + 1)
    dist.all_reduce(found, group=made)
    return made is again, dist.get_backend(made), found.tolist()


def test_a_duplicate_host_group_uses_gloo_and_is_made_once() -> None:
    assert zcomm.duplicate_host_group() is None
    assert run_ranks(duplicates_for_hosts, 2) == [(True, "gloo", [3])] * 2
