"""Choice of the ranks that are played."""

from __future__ import annotations

import numpy as np

from zengine.ordering.ranks import ranks_to_play

AXES = ("pipeline", "replicate", "shard", "sequence", "tensor")


def test_small_worlds_are_played_entirely() -> None:
    assert ranks_to_play(AXES, np.arange(64).reshape(2, 1, 8, 2, 2), 0) == list(range(64))


def test_large_worlds_by_role_and_a_sample_that_fills_every_kind_of_group() -> None:
    table = np.arange(1024).reshape(4, 1, 32, 1, 8)
    chosen = ranks_to_play(AXES, table, 3)
    assert 32 <= len(chosen) <= 80
    places = [np.argwhere(table == rank)[0] for rank in chosen]
    roles = {(p, s in (0, 31), t in (0, 7)) for p, _, s, _, t in places}
    assert len(roles) == 4 * 2 * 2
    for axis, size in enumerate(table.shape):
        groups: dict[tuple[int, ...], int] = {}
        for place in places:
            others = tuple(int(at) for index, at in enumerate(place) if index != axis)
            groups[others] = groups.get(others, 0) + 1
        assert size == 1 or max(groups.values()) > 1, AXES[axis]
    assert chosen == ranks_to_play(AXES, table, 3) != ranks_to_play(AXES, table, 4)
