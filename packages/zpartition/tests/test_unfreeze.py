"""Parameters that are unfrozen in the middle of a run are trained as in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import Offload, Speculation, Tier, ZeroPolicy

# The sums over ranks are made in another order than those over one batch: a few units of 2^-24 in each gradient,
# which Adam's division leaves at that where gradients are not tiny.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
STAGE_3 = ZeroPolicy(stage=3, persist_numel=10, unit_numel=700)
POLICIES = {
    **{f"stage {stage}": ZeroPolicy(stage=stage, bucket_numel=500) for stage in (0, 1, 2)},
    "stage 3": STAGE_3,
    "host": attrs.evolve(STAGE_3, offload=Offload(states=Tier.HOST, weights=Tier.HOST)),
    "ahead": attrs.evolve(STAGE_3, offload=Offload(states=Tier.HOST, speculation=Speculation.LAST_BACKWARD)),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20)) for _ in range(3))
        self.layers[:2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def thaw(model: Net, step: int) -> None:
    """First a part of a unit, then the rest of it and another."""
    if step == 2:
        model.layers[1][0].requires_grad_(True)
    if step == 4:
        model.layers.requires_grad_(True)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(step))


def trained_alone() -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        thaw(model, step)
        model(inputs(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(partition: zpartition.Partition, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    module: Any = partition.module
    for step in steps:
        thaw(module, step)
        partition.admit_unfrozen()
        with partition.micro_step():
            module(inputs(step).chunk(zcomm.group_size())[zcomm.group_rank()]).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()


def gradually(name: str, directory: str = "") -> None:
    policy = POLICIES.get(name) or attrs.evolve(
        STAGE_3, offload=Offload(states=Tier.DISK, weights=Tier.DISK, directory=directory)
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    partition = zpartition.shard(model, optimizer, policy=policy)
    train(partition, optimizer, range(3))
    held = {name for name, _ in partition.named_gradients()}
    with zpartition.gathered(model):
        grows = zpartition.safe_get_full_optimizer_state(model.layers[1][0].weight, "exp_avg")
    assert not held
    assert grows is not None
    assert bool(grows.any())
    train(partition, optimizer, range(3, 6))
    assert partition.layout.numel == sum(param.numel() for param in model.parameters())
    assert (partition.frozen, partition.frozen_params) == ((), {})
    for name, expected in trained_alone().items():
        torch.testing.assert_close(model.state_dict()[name], expected, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
    partition.close()
    again = zpartition.shard(model, policy=policy)  # nothing is left on the module
    again.close()


def test_one_process() -> None:
    for name in POLICIES:
        gradually(name)


def on_ranks(directory: str) -> None:
    for name in POLICIES:
        gradually(name)
    gradually("disk", directory)


def test_two_ranks_at_every_stage_and_tier() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(on_ranks, 2, directory)


def hybrid() -> None:
    POLICIES["hybrid"] = attrs.evolve(STAGE_3, shard_group_size=2)
    gradually("hybrid")


def test_four_ranks_in_shard_groups() -> None:
    run_ranks(hybrid, 4)


def adds_a_group() -> None:
    model, alone = Net(), Net()
    ours, theirs = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, alone))
    partition = zpartition.shard(model, ours, policy=STAGE_3)
    for module in (model, alone):
        module.layers[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"parameter layers.0.0.weight requires .* is in no parameter group"):
        partition.admit_unfrozen()
    for module, optimizer in ((model, ours), (alone, theirs)):
        optimizer.add_param_group({"params": module.layers[0].parameters(), "lr": 0.01})
    train(partition, ours, [1])
    alone(inputs(1)).backward()
    theirs.step()
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected, **TOLERANCE)
    partition.close()


def test_a_group_that_was_added_takes_them() -> None:
    run_ranks(adds_a_group, 2)


def refuses() -> list[str]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=STAGE_3)
    assert partition.admit_unfrozen() == ()
    found = []

    def attempt() -> None:
        with pytest.raises(ValueError) as caught:
            partition.admit_unfrozen()
        found.append(str(caught.value))

    with partition.micro_step(is_last=False):
        model(inputs(0)).backward()
    model.layers[0].requires_grad_(True)
    attempt()
    partition.zero_grad()
    with zpartition.gathered(model):
        attempt()
    if zcomm.group_rank() == 1:
        model.layers[1][0].requires_grad_(True)
    attempt()
    model.layers[:2].requires_grad_(False)
    train(partition, optimizer, [1])  # nothing has happened
    partition.close()
    return found


def test_what_cannot_be_admitted_is_rejected_on_all_ranks() -> None:
    for rank, (half_way, inside, different) in enumerate(run_ranks(refuses, 2)):
        assert "layers.0.0.weight was unfrozen in the middle of a step (4 in all). Unfreeze between" in half_way
        assert "inside a forward pass or a gathered() block" in inside
        assert f"ranks have unfrozen different parameters; rank {rank}: layers.0.0.weight" in different


def _attempt(partition: zpartition.Partition, *, has_found: bool) -> None:
    partition.admit_unfrozen()
    assert not has_found, "who has unfrozen something is told at once"
    loss = partition.module(inputs(0))
    with partition.micro_step():
        loss.backward()


def only_one_rank() -> list[str]:
    found = []
    for stage in (1, 3):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        partition = zpartition.shard(model, optimizer, policy=POLICIES[f"stage {stage}"])
        train(partition, optimizer, [0])
        is_one = zcomm.group_rank() == 0
        model.layers[1][0].requires_grad_(is_one)
        for _ in range(2):
            with pytest.raises(ValueError, match="ranks have unfrozen different parameters") as caught:
                _attempt(partition, has_found=is_one)
            found.append(str(caught.value))
        model.layers[1][0].requires_grad_(True)
        train(partition, optimizer, [1])
        assert "layers.1.0.weight" in partition.layout.names
        log: list[Any] = []
        with zcomm.traced(log.append):
            train(partition, optimizer, [1])
        assert sum("unfrozen parameters" in str(record) for record in log) == 1
        partition.close()
    return found


def test_ranks_of_which_one_has_unfrozen_something_are_all_told() -> None:
    first, second = run_ranks(only_one_rank, 2)
    assert all("; rank 0: layers.1.0.weight, layers.1.0.bias (2 in all)" in said for said in first)
    assert all("; rank 1: none. Set requires_grad alike" in said for said in second)


def invalidate() -> None:
    model, before = Net(), Net().state_dict()
    policy = attrs.evolve(STAGE_3, frozen_weight_bits=4)
    partition = zpartition.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    old = model(inputs(0))
    model.layers[0].requires_grad_(True)
    names = partition.admit_unfrozen()
    assert set(names) == {f"layers.0.{part}" for part in ("0.weight", "0.bias", "2.weight", "2.bias")}
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in names)  # the truth, not what was coded
    with pytest.raises(RuntimeError, match=r"needs weights .* from before the optimizer"), partition.micro_step():
        old.backward()
    partition.close()


def test_weights_stay_and_a_forward_from_before_is_told() -> None:
    run_ranks(invalidate, 2)
