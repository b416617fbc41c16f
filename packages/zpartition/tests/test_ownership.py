"""Ownership of parameters: acquire and release."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.ownership import one_device


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
