"""One parameter's weight, gradient and state, to read and to set, at every stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy


def make(stage: int, dtype: torch.dtype) -> tuple[nn.Module, zpartition.Partition, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 50)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    policy = ZeroPolicy(stage=stage, unit_numel=1500, persist_numel=45, max_live_numel=0)
    return model, zpartition.shard(model, optimizer, policy=policy), optimizer


def step(model: nn.Module, partition: zpartition.Partition, optimizer: torch.optim.Optimizer) -> None:
    with partition.micro_step():
        model(torch.ones(2, 30, dtype=partition.layout.buckets[0].dtype)).float().square().mean().backward()
    partition.finish_gradients()
    partition.apply(optimizer.step)


def _reads(stage: int, dtype: torch.dtype) -> list[torch.Tensor]:
    model, partition, optimizer = make(stage, dtype)
    step(model, partition, optimizer)
    weight = model[0].weight
    grad = zpartition.safe_get_full_grad(weight)
    assert grad is not None
    local = zpartition.safe_get_local_fp32_param(weight)
    assert local.numel() <= weight.numel()
    found = [zpartition.safe_get_full_fp32_param(weight), grad]
    found += [zpartition.safe_get_full_optimizer_state(weight, key) for key in ("exp_avg", "exp_avg_sq")]
    partition.zero_grad()
    assert zpartition.safe_get_full_grad(weight) is None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_stage_shows_the_same_numbers(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 50))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 50))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 30)).square().mean().backward()
    optimizer.step()
    weight = model[0].weight
    expected = [weight.data, weight.grad, optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]]
    first = None
    for stage in (0, 2, 3):
        for found in run_ranks(_reads, 2, stage, dtype):
            first = first or found
            assert all(map(torch.equal, found, first))
            assert all(tensor.dtype is torch.float32 for tensor in found)
            if dtype is torch.float32:
                for one, other in zip(found, expected):
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _sets(stage: int) -> tuple[bool, bool, bool]:
    model, partition, optimizer = make(stage, torch.float32)
    step(model, partition, optimizer)
    weight = model[0].weight
    zpartition.safe_set_full_fp32_param(weight, torch.full_like(weight, 2.0))
    zpartition.safe_set_full_optimizer_state(weight, torch.full(weight.shape, 3.0), "exp_avg")
    zpartition.safe_set_full_grad(weight, torch.full(weight.shape, 4.0))
    grad = zpartition.safe_get_full_grad(weight)
    part = zpartition.safe_get_local_optimizer_state(weight, "exp_avg_sq")
    zpartition.safe_set_local_optimizer_state(weight, torch.full_like(part, 5.0), "exp_avg_sq")
    partition.publish()
    with zpartition.gathered(weight):
        shown = bool((weight == 2.0).all())
    state = [zpartition.safe_get_full_optimizer_state(weight, key) for key in ("exp_avg", "exp_avg_sq")]
    return shown, grad is not None and bool((grad == 4.0).all()), [float(s.mean()) for s in state] == [3.0, 5.0]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_set_is_there(stage: int) -> None:
    assert run_ranks(_sets, 2, stage) == [(True, True, True)] * 2


def test_state_that_is_set_before_the_first_update_is_what_that_begins_with() -> None:
    model, partition, optimizer = make(0, torch.float32)
    model[2](torch.ones(2, 40)).square().mean().backward()
    partition.finish_gradients()
    partition.apply(optimizer.step, any_unused=True)
    partition.zero_grad()
    weight = model[0].weight
    assert not zpartition.safe_get_full_optimizer_state(weight, "exp_avg").any()
    zpartition.safe_set_full_optimizer_state(weight, torch.full((40, 30), 1e6), "exp_avg")
    step(model, partition, optimizer)
    found = zpartition.safe_get_full_optimizer_state(weight, "exp_avg")
    assert torch.allclose(found, torch.full((40, 30), 9e5), rtol=1e-3)
    counts = {
        s.name: s.tensor.item() for key, s in zpartition.state_shards(optimizer, partition.holders) if key == "step"
    }
    assert counts == {"0.weight": 1, "0.bias": 1, "2.weight": 2, "2.bias": 2}


def test_mistakes_are_refused_by_name() -> None:
    model, partition, optimizer = make(0, torch.float32)
    with pytest.raises(ValueError, match=r"keeps no 'exp_avg' of this parameter; it keeps nothing yet"):
        zpartition.safe_get_full_optimizer_state(model[0].weight, "exp_avg")
    with pytest.raises(ValueError, match="there is no reduced gradient"):
        zpartition.safe_set_local_grad(model[0].weight, torch.zeros(1200))
    step(model, partition, optimizer)
    with pytest.raises(ValueError, match=r"keeps no 'moment' .* it keeps step, exp_avg, exp_avg_sq"):
        zpartition.safe_get_full_optimizer_state(model[0].weight, "moment")
    with pytest.raises(ValueError, match=r"the value has shape \(3,\), the parameter \(40, 30\)"):
        zpartition.safe_set_full_fp32_param(model[0].weight, torch.zeros(3))
    with pytest.raises(ValueError, match="belongs to no partition"):
        zpartition.safe_get_full_fp32_param(nn.Parameter(torch.zeros(2)))


def _frozen() -> None:
    model = nn.Linear(40, 50)
    model.weight.requires_grad_(False)
    partition = zpartition.shard(model, policy=ZeroPolicy(stage=3, persist_numel=0))
    with pytest.raises(ValueError, match="is frozen: it has no master"):
        zpartition.safe_get_full_fp32_param(model.weight)
    assert sorted(partition.names()) == ["bias", "weight"]


def test_a_frozen_parameter_has_none() -> None:
    run_ranks(_frozen, 2)
