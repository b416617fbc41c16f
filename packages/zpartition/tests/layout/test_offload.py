"""Offload policy: rejected combinations, placement of buckets, and step groups."""

from __future__ import annotations

import pytest

from zpartition import Offload, Speculation, Tier, ZeroPolicy
from zpartition.layout.policy import NOTHING, step_groups


def test_by_default_nothing_moves() -> None:
    assert ZeroPolicy().offload is NOTHING
    assert not NOTHING.moves_states
    assert NOTHING.place([5, 5]) == (Tier.DEVICE, Tier.DEVICE)


def test_combinations_without_a_meaning_are_rejected() -> None:
    with pytest.raises(ValueError, match="needs a directory"):
        Offload(states=Tier.DISK)
    with pytest.raises(ValueError, match=r"Use states=Tier\.HOST, or Speculation\.OFF"):
        Offload(states=Tier.DISK, directory="x", speculation=Speculation.LAST_BACKWARD)
    with pytest.raises(ValueError, match="ratio"):
        Offload(states=Tier.HOST, ratio=1.5)


@pytest.mark.parametrize(("ratio", "moved"), [(0.0, 0), (0.3, 1), (0.5, 2), (0.6, 2), (1.0, 4)])
def test_the_first_buckets_leave_as_close_to_the_ratio_as_whole_ones_come(ratio: float, moved: int) -> None:
    places = Offload(states=Tier.HOST, ratio=ratio).place([10, 10, 10, 10])
    assert places == (Tier.HOST,) * moved + (Tier.DEVICE,) * (4 - moved)


def test_groups_hold_each_bucket_once_those_on_the_device_together_and_first() -> None:
    tiers = [Tier.HOST, Tier.HOST, Tier.DEVICE, Tier.HOST, Tier.DEVICE, Tier.HOST]
    numels = [10, 20, 99, 30, 99, 50]
    assert step_groups(tiers, numels, 0) == ((2, 4), (0,), (1,), (3,), (5,))
    assert step_groups(tiers, numels, 60) == ((2, 4), (0, 1, 3), (5,))
    assert step_groups([Tier.DEVICE] * 2, [1, 1], 0) == ((0, 1),)
    assert step_groups([], [], 0) == ()
