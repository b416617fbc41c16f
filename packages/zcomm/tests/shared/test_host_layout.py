"""Host layouts, and the placements that support two levels."""

from __future__ import annotations

import pytest

from zcomm.shared.host_layout import HostLayout


@pytest.mark.parametrize(
    ("names", "hosts", "obstacle"),
    [
        ("AAAA", ((0, 1, 2, 3),), ""),
        ("AABB", ((0, 1), (2, 3)), ""),
        ("BABA", ((0, 2), (1, 3)), ""),
        ("ABBA", ((0, 3), (1, 2)), ""),
        ("AAABBB", ((0, 1, 2), (3, 4, 5)), ""),
        ("AB", ((0,), (1,)), ""),
        (
            "AAAB",
            ((0, 1, 2), (3,)),
            "its hosts have different numbers of ranks: 3 on that of rank 0, 1 on that of rank 3",
        ),
        (
            "AABCDEF",
            ((0, 1), (2,), (3,), (4,), (5,), (6,)),
            "its hosts have different numbers of ranks: 2 on that of rank 0, 1 on that of rank 2, "
            "1 on that of rank 3, 1 on that of rank 4 and 2 hosts more",
        ),
        ("AABBAB", ((0, 1, 4), (2, 3, 5)), "ranks 0, 1, 4 share a host and are not evenly spaced in the group"),
    ],
)
def test_hosts_are_found_and_an_obstacle_is_described(
    names: str, hosts: tuple[tuple[int, ...], ...], obstacle: str
) -> None:
    places = HostLayout.of(names)
    assert places.hosts == hosts
    assert places.obstacle() == obstacle


def test_ranks_of_equal_index_stand_across_the_hosts() -> None:
    places = HostLayout.of("ABABAB")
    assert (places.num_hosts, places.ranks_per_host) == (2, 3)
    assert [places.locate(rank) for rank in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [places.peers(index) for index in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert [places.stride(host) for host in range(2)] == [2, 2]
    assert HostLayout.of("AB").stride(0) == 1
