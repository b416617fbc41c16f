"""Master placements: masters follow the weights and vice versa, at every tier."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from zpartition.layout.policy import Tier
from zpartition.memory.mover import PlainMover
from zpartition.memory.placement import ON_DEVICE, HostPlacement, MasterPlacement

PLACEMENTS = {"in place": ON_DEVICE, "host": HostPlacement(PlainMover())}


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_master_is_refreshed_from_the_weights_and_published_into_them(placement: MasterPlacement) -> None:
    weights = torch.arange(8).bfloat16()
    master = Parameter(torch.zeros(8))
    placement.adopt(master)
    placement.refresh(master, weights)
    assert torch.equal(placement.values(master), torch.arange(8).float())
    placement.write(master, 2, torch.full((3,), 0.5))
    placement.publish(master, weights)
    assert weights.tolist() == [0, 1, 0.5, 0.5, 0.5, 5, 6, 7]


def test_the_host_has_memory_of_its_own_even_in_full_precision() -> None:
    weights = torch.ones(8)
    shared, apart = Parameter(weights[:]), Parameter(weights[:])
    ON_DEVICE.adopt(shared)
    PLACEMENTS["host"].adopt(apart)
    assert (shared.data_ptr() == weights.data_ptr(), apart.data_ptr() == weights.data_ptr()) == (True, False)
    assert [placement.tier for placement in PLACEMENTS.values()] == [Tier.DEVICE, Tier.HOST]


def test_state_is_the_optimizers() -> None:
    master = Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([master], momentum=0.9)
    ON_DEVICE.set_state(optimizer, master, {"momentum_buffer": torch.ones(4)})
    assert ON_DEVICE.state(optimizer, master)["momentum_buffer"].sum() == 4
