"""Parameters without memory that report a device."""

from __future__ import annotations

import gc

import torch
from torch import nn

import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.deferred import fake_device as hidden


def built() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))


def without_memory() -> nn.Sequential:
    with zpartition.Init(fake_device="cpu"):
        return built()


def test_they_say_the_device_and_hold_one_number():
    net = without_memory()
    weight = net[0].weight
    assert weight.device.type == "cpu"
    assert weight.shape == (6, 4)
    assert weight.untyped_storage().nbytes() == 4
    assert bool(weight.detach().isnan().all())


def test_a_look_shows_the_values_and_hides_them_again():
    net, plain = without_memory(), built()
    weight = net[0].weight
    with zpartition.gathered(weight):
        assert torch.equal(weight, plain[0].weight)
    assert weight is net[0].weight
    assert weight.untyped_storage().nbytes() == 4


def check_larger() -> bool:
    """What libraries do to make an embedding larger."""
    net, plain = without_memory(), built()
    old = net[0]
    new = nn.Embedding(8, 4, device=old.weight.device, dtype=old.weight.dtype)
    with zpartition.gathered([old.weight, new.weight], modifier_rank=0), torch.no_grad():
        new.weight[:6] = old.weight
        new.weight[6:] = 0
    with zpartition.gathered([old.weight, new.weight], modifier_rank=0):
        old.weight = new.weight
    net[1].requires_grad_(False)
    partition = zpartition.shard(net, policy=ZeroPolicy(stage=3))
    assert not net[1].weight.requires_grad
    with zpartition.gathered(net):
        same = torch.equal(net[0].weight[:6], plain[0].weight) and torch.equal(net[1].weight, plain[1].weight)
        same = same and not net[0].weight[6:].any()
    partition.close()
    return same


def test_new_parameters_go_beside_them_and_freezing_is_kept():
    assert check_larger()
    assert run_ranks(check_larger, 2) == [True, True]


def test_the_table_forgets_what_nobody_has():
    net = without_memory()
    mine = {id(net[0].weight), id(net[1].weight)}
    assert mine <= hidden._faked.keys()
    del net
    gc.collect()
    assert not mine & hidden._faked.keys()
    assert hidden.clear_fake_device([nn.Parameter(torch.ones(1))]) == []
