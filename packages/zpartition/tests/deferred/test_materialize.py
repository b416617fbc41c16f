"""Reading and editing weights of a module built inside Init before it is partitioned."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy


class Net(nn.Module):
    """Random weights, a tied one, a buffer that is computed, one that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.first.weight
        self.register_buffer("angles", torch.arange(4.0) ** 2 / 3)
        self.register_buffer("drawn", torch.rand(3))


def built(seed: int = 3, **options: bool) -> Net:
    torch.manual_seed(seed)
    if options.pop("plain", False):
        return Net()
    with zpartition.Init(**options):
        return Net()


def state_of(net: Net, stage: int = 3) -> dict[str, torch.Tensor]:
    partition = zpartition.shard(net, policy=ZeroPolicy(stage=stage))
    with zpartition.gathered(net):
        found = {name: value.detach().clone() for name, value in net.state_dict().items()}
    partition.close()
    return found


def check_look() -> bool:
    plain, net = built(plain=True), built()
    param = net.first.weight
    param.flag = "kept"
    with zpartition.gathered([net.last.weight, param]):
        seen = torch.equal(net.first.weight, plain.first.weight) and torch.equal(net.head.weight, plain.head.weight)
        assert net.last.bias.device.type == "meta"
    assert net.first.weight is param
    assert param.flag == "kept"
    assert param.device.type == "meta"
    found = state_of(net)
    return seen and all(torch.equal(found[name], value) for name, value in plain.state_dict().items())


def test_looking_changes_nothing_alone_and_on_two_ranks():
    assert check_look()
    assert run_ranks(check_look, 2) == [True, True]


def check_edits() -> dict[str, float]:
    net = built()
    with zpartition.gathered({net.last.weight, net.last.bias, net.first.bias}, modifier_rank=1), torch.no_grad():
        if zcomm.group_rank() == 1:
            net.last.weight.fill_(1.0)
            net.last.bias.data = torch.full((5,), 2.0)
            net.first.bias.add_(100.0)
        net.first.bias.requires_grad_(False)
    assert not net.first.bias.requires_grad
    net.first.bias.requires_grad_(True)
    with zpartition.gathered(net.last):
        assert bool((net.last.weight == 1).all())
    with zpartition.recording(net):
        net.to(torch.bfloat16)  # what an engine does before it shards
    found = state_of(net)
    plain = built(plain=True).state_dict()
    assert torch.equal(found["first.weight"], plain["first.weight"].bfloat16())
    assert torch.allclose(found["first.bias"].float(), plain["first.bias"] + 100, rtol=1e-2)
    return {name: found[f"last.{name}"].float().mean().item() for name in ("weight", "bias")}


def test_what_one_rank_writes_is_everybodys_and_survives_casting_and_sharding():
    assert run_ranks(check_edits, 2) == [{"weight": 1.0, "bias": 2.0}] * 2


def edit(net: Net, modifier_rank: int | None, fail: bool = False) -> None:
    with zpartition.gathered(net.last, modifier_rank=modifier_rank), torch.no_grad():
        if zcomm.group_rank() == 0:
            net.last.weight.zero_()
        if fail:
            raise KeyError


def check_refusal() -> bool:
    net = built()
    with pytest.raises(ValueError, match=r"edited inside gathered.*before they were partitioned"):
        edit(net, None)
    with pytest.raises(KeyError):
        edit(net, 0, fail=True)
    found = state_of(net)
    return torch.equal(found["last.weight"], built(plain=True).last.weight)


def test_edits_that_nobody_may_make_are_undone_on_all_ranks():
    assert run_ranks(check_refusal, 2) == [True, True]


def check_agreement() -> bool:
    net = built()
    with zpartition.gathered(net.last), torch.no_grad():
        net.last.weight.fill_(2.0)
    return bool((state_of(net)["last.weight"] == 2).all())


@pytest.mark.parametrize("world", [1, 2])
def test_what_all_ranks_write_alike_counts(world: int):
    assert run_ranks(check_agreement, world) == [True] * world


def check_memory() -> tuple[int, int]:
    net = built()
    with zpartition.gathered(net.norm.weight):
        pass
    from zpartition.deferred.init import recording_of
    from zpartition.deferred.materialize import materialize

    recorded = recording_of(net)
    assert recorded is not None
    assert not recorded.steps
    kept = materialize(recorded, None)
    return sum(part.numel() for part in kept.parts.values()), sum(kept.nbytes.values())


def test_a_rank_keeps_its_share_alone():
    for mine, everything in run_ranks(check_memory, 2):
        assert everything / 2 <= mine <= everything / 2 + 64


def test_buffers_that_need_no_random_numbers_are_made_at_once_when_asked():
    net = built(make_buffers=True)
    plain = built(plain=True)
    assert torch.equal(net.angles, plain.angles)
    assert torch.equal(net.norm.running_var, torch.ones(7))
    assert net.drawn.device.type == "meta"
    net.norm.running_mean.fill_(4.0)
    assert net.first.weight.device.type == "meta"
    found = state_of(net)
    assert torch.equal(found["drawn"], plain.drawn)
    assert torch.equal(found["norm.running_mean"], torch.full((7,), 4.0))
    assert torch.equal(found["first.weight"], plain.first.weight)


def check_mixed(stage: int, trained: bool) -> bool:
    """A backbone without memory, a plain layer beside it: rank 0's values of that count."""
    net, plain = built(), built(plain=True)
    torch.manual_seed(50 + zcomm.group_rank())
    net.last = nn.Linear(7, 5).requires_grad_(trained)
    mine = net.last.weight.detach().clone()
    zcomm.broadcast(mine, source=0)
    found = state_of(net, stage)
    return torch.equal(found["last.weight"], mine) and torch.equal(found["first.weight"], plain.first.weight)


def check_mixed_stages(trained: bool) -> list[bool]:
    return [check_mixed(stage, trained) for stage in (0, 2, 3)]


@pytest.mark.parametrize("trained", [True, False])
def test_parameters_that_were_made_outside_keep_their_values_at_every_stage(trained: bool):
    assert run_ranks(check_mixed_stages, 2, trained) == [[True] * 3] * 2


def test_what_was_kept_goes_when_the_last_module_has_its_values() -> None:
    with zpartition.Init() as init:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    recorded = weakref.ref(init.recorded)
    del init
    with zpartition.gathered(second.weight, modifier_rank=0), torch.no_grad():
        second.weight.fill_(2.0)
    for module in (first, second):
        with zpartition.recording(module):
            module.to(torch.bfloat16)
    zpartition.shard(first)
    gc.collect()
    assert recorded() is not None
    zpartition.shard(second)
    assert bool((second.weight == 2).all())
    gc.collect()
    assert recorded() is None
