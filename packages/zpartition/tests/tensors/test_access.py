"""One parameter's weight, gradient and state, to read and to set, at every stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zcomm
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


def test_mistakes_are_rejected_by_name() -> None:
    model, partition, optimizer = make(0, torch.float32)
    with pytest.raises(ValueError, match=r"has no state 'exp_avg' of this parameter; it has none yet"):
        zpartition.safe_get_full_optimizer_state(model[0].weight, "exp_avg")
    with pytest.raises(ValueError, match="there is no reduced gradient"):
        zpartition.safe_set_local_grad(model[0].weight, torch.zeros(1200))
    step(model, partition, optimizer)
    with pytest.raises(ValueError, match=r"has no state 'moment' .* it has step, exp_avg, exp_avg_sq"):
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


def _unsent(stage: int, how: str) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """(gradients as they are told on the way, the gradient that the step uses)."""
    model, partition, _ = make(stage, torch.float32)
    weight, told = model[0].weight, []
    told.append(zpartition.safe_get_full_grad(weight))
    for micro in range(2):
        loss = model(torch.full((2, 30), 1.0 + micro + zcomm.group_rank())).square().mean()
        if how == "plain":
            loss.backward()
        else:
            with partition.micro_step(is_last=False, is_local=how == "no_sync" or micro == 1):
                loss.backward()
        told.append(zpartition.safe_get_full_grad(weight))
    partition.finish_gradients()
    used = zpartition.safe_get_full_grad(weight)
    assert used is not None
    return told, used


@pytest.mark.parametrize("how", ["plain", "no_sync", "no_sync after a reduced one"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_no_rank_has_sent_is_told_as_the_mean_of_all(stage: int, how: str) -> None:
    for told, used in run_ranks(_unsent, 2, stage, how):
        assert told[0] is None
        assert told[1] is not None
        assert told[2] is not None
        assert not torch.equal(told[1], told[2])
        torch.testing.assert_close(told[2], used)


def _one_rank_alone_has_a_gradient() -> torch.Tensor | None:
    model, partition, _ = make(2, torch.float32)
    with partition.micro_step(is_local=True):
        model[0 if zcomm.group_rank() else 2](torch.ones(2, 30 if zcomm.group_rank() else 40)).sum().backward()
    return zpartition.safe_get_full_grad(model[0].weight)


def test_a_rank_without_a_gradient_takes_part() -> None:
    first, second = run_ranks(_one_rank_alone_has_a_gradient, 2)
    assert first is not None
    torch.testing.assert_close(first, torch.ones(40, 30))
    torch.testing.assert_close(first, second)


def _parts(tier: zpartition.Tier, persist_numel: int, freezes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).bfloat16()
    model[1].requires_grad_(not freezes)
    offload = zpartition.Offload(weights=tier)
    policy = zpartition.ZeroPolicy(stage=3, unit_numel=50, persist_numel=persist_numel, offload=offload)
    partition = zpartition.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    assert bool(partition.frozen) == freezes
    assert all(zpartition.local_weight(param).dtype == torch.bfloat16 for param in model.parameters())
    return zpartition.local_weight(model[0].weight).clone(), zpartition.local_weight(model[1].weight).clone()


@pytest.mark.parametrize(("world", "persist_numel", "freezes"), [(1, 0, False), (2, 100, False), (2, 0, True)])
@pytest.mark.parametrize("tier", [zpartition.Tier.DEVICE, zpartition.Tier.HOST])
def test_parts_of_weights_of_all_ranks_are_the_weight(
    tier: zpartition.Tier, world: int, persist_numel: int, freezes: bool
) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).bfloat16()
    parts = run_ranks(_parts, world, tier, persist_numel, freezes)
    for index, layer in enumerate(plain):
        assert torch.equal(torch.cat([each[index] for each in parts]), layer.weight.detach().flatten())


def test_a_parameter_of_nobody_has_no_part() -> None:
    with pytest.raises(ValueError, match="belongs to no partition"):
        zpartition.local_weight(nn.Parameter(torch.ones(2)))
