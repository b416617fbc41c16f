"""Ownership of parameters: acquire and release."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import Offload, Tier, ZeroPolicy
from zpartition.ownership import _left, one_device


class Renamed(nn.Module):
    """The same module under another name."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk


def test_the_same_parameters_under_other_names_are_claimed_all_the_same():
    model = nn.Linear(2, 2)
    partition = zpartition.shard(model)
    with pytest.raises(ValueError, match=r"parameter trunk\.weight is partitioned already"):
        zpartition.shard(Renamed(model))
    partition.close()


def test_a_partition_that_is_dropped_takes_its_hooks_and_claims_along():
    model = nn.Linear(2, 2)
    partition = zpartition.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dead = weakref.ref(partition)
    del partition
    gc.collect()
    assert dead() is None
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    again = zpartition.shard(model, optimizer)
    before = model.bias.detach().clone()
    with again.micro_step():
        model(torch.ones(1, 2)).sum().backward()
    again.finish_gradients()
    again.apply(optimizer.step)
    torch.testing.assert_close(model.bias.data, before - 0.5)


def _dropped_in_a_cycle() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    strict = ZeroPolicy(stage=3, unit_numel=80, persist_numel=0, max_live_numel=0)
    partition = zpartition.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=strict)
    cycle: dict[str, object] = {"partition": partition}
    cycle["itself"] = cycle
    dead = weakref.ref(partition)
    del partition, cycle
    gc.collect()
    assert dead() is None
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
    assert not any(getattr(child, name) for child in model.modules() for name in hooks)
    assert all(type(child._parameters) is dict for child in model.modules())


def test_a_partition_in_cyclic_garbage_takes_its_hooks_along_at_stage_3_too():
    run_ranks(_dropped_in_a_cycle, 2)


def test_parameters_in_two_places_are_named_with_their_devices():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(ValueError, match=r"one device; found 0\.weight on cpu, 1\.weight on meta"):
        one_device(dict(model.named_parameters()))


def test_complex_parameters_are_rejected_by_name():
    module = nn.Module()
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"parameter phase is torch\.complex64"):
        zpartition.shard(module)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    with zpartition.gathered(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def step(partition: zpartition.Partition) -> None:
    with partition.micro_step():
        partition.module(torch.ones(1, 8)).square().sum().backward()
    partition.finish_gradients()
    partition.apply(partition.optimizer.step)
    partition.zero_grad()


def partitioned(model: nn.Module, **more: Any) -> zpartition.Partition:
    policy = ZeroPolicy(stage=3, unit_numel=80, persist_numel=0, max_live_numel=0, **more)
    trained = [param for param in model.parameters() if param.requires_grad]
    return zpartition.shard(model, torch.optim.SGD(trained, lr=0.1), policy=policy)


def _dropped_shards(case: str, folder: str) -> bool:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].requires_grad_(False)
    offload = {
        "host": Offload(states=Tier.HOST, weights=Tier.HOST),
        "disk": Offload(states=Tier.DISK, weights=Tier.DISK, directory=folder),
    }
    more = {"offload": offload[case]} if case in offload else {}
    if case == "quantized":
        more["weight_bits"] = 8
    partition = partitioned(model, **more)
    step(partition)
    if case == "unfrozen":
        model[2].requires_grad_(True)
        partition.optimizer.add_param_group({"params": list(model[2].parameters())})
        partition.admit_unfrozen()
        step(partition)
    expected = weights(model)
    if case == "closed twice":
        partition.close()
        again = partitioned(model)
        step(again)
        expected = weights(model)
        partition = [partition, again]
        del again
    dead = weakref.ref(partition[1] if isinstance(partition, list) else partition)
    if case == "offloaded":
        partition.offload_states()
    del partition
    gc.collect()
    assert dead() is None
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    if zcomm.group_size() > 1:
        assert model[0].weight.isnan().all(), "no rank has the others' shards"
    if case == "replaced":
        model[0].weight.data = expected["0.weight"] = torch.ones(8, 8)
    if case == "offloaded":
        with pytest.raises(ValueError, match=r"parameter 0\.weight has no weights"):
            partitioned(model)
        return True
    again = partitioned(model)
    assert not _left
    found = weights(model)
    step(again)
    again.close()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    "case", ["plain", "host", "disk", "quantized", "unfrozen", "closed twice", "replaced", "offloaded"]
)
@pytest.mark.parametrize("world", [1, 2])
def test_weights_of_a_dropped_partition_are_those_of_the_next_one(world: int, case: str, tmp_path: Path) -> None:
    assert all(run_ranks(_dropped_shards, world, case, str(tmp_path)))


def _dropped_with_its_module() -> None:
    model = nn.Linear(8, 8)
    partition = partitioned(model)
    del partition
    gc.collect()
    assert len(_left) == 2
    model.weight = None
    assert len(_left) == 1
    del model
    gc.collect()
    assert not _left


def test_shards_of_a_dropped_partition_go_with_the_module() -> None:
    run_ranks(_dropped_with_its_module, 2)


def test_a_partition_in_a_cycle_is_collected_before_the_next_one():
    model = nn.Linear(2, 2)
    cycle: list[object] = [zpartition.shard(model)]
    cycle.append(cycle)
    del cycle
    gc.disable()
    try:
        partition = zpartition.shard(model)
        with pytest.raises(ValueError, match=r"close\(\) the partition .* or drop every reference to it"):
            zpartition.shard(model)
    finally:
        gc.enable()
    partition.close()
