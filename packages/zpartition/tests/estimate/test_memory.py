"""Memory plan: its rows, and that a live partition holds as much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import Parameter

import zpartition
from zcomm.testing import run_ranks
from zpartition import Offload, Speculation, Tier, ZeroPolicy
from zpartition.memory import mover
from zpartition.testing import Net as SmallNet


class Net(nn.Module):
    """Blocks, a frozen layer, and a parameter of the root."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(4))
        self.frozen = nn.Linear(64, 64)
        self.frozen.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(64))
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.gain
        for block in self.blocks:
            x = x + block(x)
        return self.frozen(x).float().square().mean()


def adamw(params: list[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params)


def policy(stage: int) -> ZeroPolicy:
    return ZeroPolicy(stage=stage, bucket_numel=40_000, unit_numel=40_000, persist_numel=300, max_live_numel=0)


def _live(stage: int, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    model = Net(dtype)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    partition = zpartition.shard(model, optimizer, policy=policy(stage))
    for _ in range(3):
        with partition.micro_step():
            model(torch.arange(8)).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    return partition.ledger(), partition.unsharder.peak_numel * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_live_partition_holds_what_the_plan_says(stage: int, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = Net(dtype)
    planned = zpartition.plan(model, policy=policy(stage), world_size=2, optimizer=adamw)
    for ledger, peak in run_ranks(_live, 2, stage, dtype):
        for owner in ("parameters", "masters", "accumulators", "states"):
            assert ledger[owner] == pytest.approx(planned.ledger()[owner], rel=0.02), owner
        assert ledger["buckets"] <= planned.buckets
        assert ledger["gathered units"] <= planned.gathered_units
        assert peak <= planned.gathered_units


def _live_offloaded(stage: int, offload: Offload) -> tuple[dict[str, int], int]:
    model = Net(torch.bfloat16)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    partition = zpartition.shard(model, optimizer, policy=attrs.evolve(policy(stage), offload=offload))
    for _ in range(3):
        with partition.micro_step():
            model(torch.arange(8)).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    ledger = partition.ledger()
    memory = {s.master.data_ptr() for s in partition.storages} & {s.own_span.data_ptr() for s in partition.storages}
    partition.close()
    return ledger, len(memory)


@pytest.mark.parametrize(
    "offload",
    [
        Offload(states=Tier.HOST),
        Offload(states=Tier.HOST, ratio=0.4),
        Offload(states=Tier.HOST, speculation=Speculation.LAST_BACKWARD),
        Offload(states=Tier.DISK, directory="here", buffer_count=2),
        Offload(states=Tier.HOST, weights=Tier.HOST),
        Offload(weights=Tier.DISK, directory="here"),
        Offload(states=Tier.DISK, directory="here", step_numel=30_000, ratio=0.7),
    ],
)
def test_what_offload_moves_is_counted_by_place_and_planned_alike(offload: Offload, tmp_path: Path) -> None:
    if offload.directory:
        offload = attrs.evolve(offload, directory=str(tmp_path))
    with torch.device("meta"):
        model = Net(torch.bfloat16)
    for stage in (1, 3):
        chosen = attrs.evolve(policy(stage), offload=offload)
        planned = zpartition.plan(model, policy=chosen, world_size=2, optimizer=adamw)
        for ledger, num_shared in run_ranks(_live_offloaded, 2, stage, offload):
            assert not num_shared
            for owner, size in planned.ledger().items():
                if owner not in ("buckets", "gathered units"):
                    assert ledger.get(owner, 0) == pytest.approx(size, rel=0.02), (stage, owner)
            assert not set(ledger) - set(planned.ledger())
            assert ledger["buckets"] <= planned.buckets
        on_disk = offload.states is Tier.DISK or (stage == 3 and offload.weights is Tier.DISK)
        assert (planned.disk_bytes > 0) == on_disk
        assert (planned.masters == 0) == (offload.moves_states and offload.ratio == 1)


NARROW = ZeroPolicy(master_dtype=torch.bfloat16, accumulate_dtype=torch.bfloat16)


def _live_narrow(folder: str) -> list[tuple[dict[str, int], list[torch.Tensor]]]:
    """(ledger, weights) of narrow masters in each tier."""
    found = []
    for offload in (Offload(), Offload(states=Tier.HOST), Offload(states=Tier.DISK, directory=folder)):
        torch.manual_seed(0)
        model = Net(torch.bfloat16)
        optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        chosen = attrs.evolve(NARROW, stage=3, unit_numel=40_000, persist_numel=300, offload=offload)
        partition = zpartition.shard(model, optimizer, policy=chosen)
        for _ in range(2):
            with partition.micro_step():
                model(torch.arange(8)).backward()
            partition.finish_gradients()
            partition.apply(optimizer.step)
            partition.zero_grad()
        ledger = partition.ledger()
        with zpartition.gathered(model):
            found.append((ledger, [param.detach().clone() for param in model.parameters()]))
        partition.close()
    return found


def test_narrow_masters_in_every_tier_have_the_same_bits_and_the_planned_size(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net(torch.bfloat16)
    (device, weights), *others = run_ranks(_live_narrow, 2, str(tmp_path))[0]
    assert device["masters"] == 0
    for ledger, moved in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(moved, weights))
        tier = Tier.DISK if ledger.get("disk masters") else Tier.HOST
        chosen = attrs.evolve(NARROW, stage=3, unit_numel=40_000, persist_numel=300)
        offload = Offload(states=tier, directory="here" if tier is Tier.DISK else "")
        planned = zpartition.plan(model, policy=attrs.evolve(chosen, offload=offload), world_size=2, optimizer=adamw)
        for owner, size in planned.ledger().items():
            if owner not in ("buckets", "gathered units"):
                assert ledger.get(owner, 0) == pytest.approx(size, rel=0.02), owner


@pytest.mark.parametrize(("stage", "bytes_per_param"), [(0, 16), (1, 4 + 12 / 8), (2, 4 + 12 / 8), (3, 16 / 8)])
def test_model_states_follow_the_formula(stage: int, bytes_per_param: float) -> None:
    """16 bytes a parameter in fp32, split as each stage says; at stage 0 gradients are the buckets themselves."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    strict = ZeroPolicy(stage=stage, persist_numel=0)
    planned = zpartition.plan(model, policy=strict, world_size=8, optimizer=adamw)
    gradients = planned.buckets if stage == 0 else 0
    numel = sum(p.numel() for p in model.parameters())
    assert planned.model_states_bytes + gradients == pytest.approx(bytes_per_param * numel, rel=0.02)


def test_it_is_printed_as_a_table() -> None:
    with torch.device("meta"):
        model = nn.Linear(1024, 1024)
    text = str(zpartition.plan(model, policy=ZeroPolicy(stage=2), world_size=2, optimizer=adamw))
    assert text.splitlines()[0].split() == ["parameters", "4.0", "MiB"]
    assert text.splitlines()[-1].startswith("total")


def test_states_are_those_of_the_optimizer_that_is_given() -> None:
    with torch.device("meta"):
        model = nn.Linear(1024, 1024)
    plain: Any = zpartition.plan(model, policy=ZeroPolicy(), world_size=1)
    momentum = zpartition.plan(
        model, policy=ZeroPolicy(), world_size=1, optimizer=lambda p: torch.optim.SGD(p, momentum=0.9)
    )
    assert (plain.states, momentum.states / momentum.parameters) == (0, 1.0)


def test_on_a_gpu_what_copies_pass_through_is_planned() -> None:
    model = SmallNet(torch.bfloat16)
    policy = ZeroPolicy(stage=1, bucket_numel=3000, offload=Offload(states=Tier.HOST))
    on_cpu = zpartition.plan(model, policy=policy, world_size=1)
    once = zpartition.plan(model, policy=policy, world_size=1, device="cuda")
    twice = zpartition.plan(model, policy=policy, world_size=1, device="cuda", num_backwards=2)
    largest = 3072  # elements of the largest bucket; accumulators are float32, weights bf16
    assert (on_cpu.staging, "staging" in on_cpu.ledger()) == (0, False)
    assert once.staging == once.ledger()["staging"] == (mover.IN_FLIGHT + 1) * 4 * largest
    assert twice.staging == once.staging + 4 * largest
    assert once.elsewhere["pinned staging"] == mover.NUM_STAGES * 2 * largest
    assert once.total_bytes == on_cpu.total_bytes + once.staging
    weights = ZeroPolicy(stage=3, unit_numel=3000, persist_numel=100, offload=Offload(weights=Tier.HOST, pin=False))
    resting = zpartition.plan(model, policy=weights, world_size=2, device="cuda")
    assert 0 < resting.staging <= resting.gathered_units // 2
    assert resting.elsewhere["host staging"] > 0
