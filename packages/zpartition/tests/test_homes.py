"""Homes: masters follow the weights and the other way round, wherever they are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from zpartition.homes import IN_PLACE, Home, OnHost
from zpartition.mover import PlainMover
from zpartition.offload import Tier

HOMES = {"in place": IN_PLACE, "host": OnHost(PlainMover())}


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_a_master_is_refreshed_from_the_weights_and_published_into_them(home: Home) -> None:
    weights = torch.arange(8).bfloat16()
    master = Parameter(torch.zeros(8))
    home.adopt(master)
    home.refresh(master, weights)
    assert torch.equal(home.values(master), torch.arange(8).float())
    home.write(master, 2, torch.full((3,), 0.5))
    home.publish(master, weights)
    assert weights.tolist() == [0, 1, 0.5, 0.5, 0.5, 5, 6, 7]


def test_the_host_has_memory_of_its_own_even_in_full_precision() -> None:
    weights = torch.ones(8)
    shared, apart = Parameter(weights[:]), Parameter(weights[:])
    IN_PLACE.adopt(shared)
    HOMES["host"].adopt(apart)
    assert (shared.data_ptr() == weights.data_ptr(), apart.data_ptr() == weights.data_ptr()) == (True, False)
    assert [home.tier for home in HOMES.values()] == [Tier.DEVICE, Tier.HOST]


def test_state_is_the_optimizers() -> None:
    master = Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([master], momentum=0.9)
    IN_PLACE.give(optimizer, master, {"momentum_buffer": torch.ones(4)})
    assert IN_PLACE.state(optimizer, master)["momentum_buffer"].sum() == 4
