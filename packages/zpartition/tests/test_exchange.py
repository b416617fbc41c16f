"""Gradients summed over all ranks, over those that hold one copy, and over both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.exchange import exchange_for
from zpartition.ranks import Ranks

NUM_STEPS, WORLD = 4, 4


class Net(nn.Module):
    """Tied, frozen and unused parameters, a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 24, sparse=True)
        self.body = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embed(tokens))
        return self.norm((hidden + self.body(hidden)).flatten(0, 1)).pow(3).mean()


def data() -> torch.Tensor:
    return torch.randint(0, 11, (NUM_STEPS, 3, WORLD, 4, 6), generator=torch.Generator().manual_seed(5))


def _sums() -> list[bool]:
    """Every way to reduce gives the same sum of small whole numbers."""
    rank = zcomm.group_rank()
    contributions = [
        torch.randint(-9, 9, (64,), generator=torch.Generator().manual_seed(r)).float() for r in range(4)
    ]
    expected = torch.stack(contributions).sum(0)
    found = []
    for size, num_shards in ((0, 1), (0, 4), (2, 2), (1, 1)):
        policy = ZeroPolicy(stage=1, shard_group_size=size)
        exchange = exchange_for(Ranks.of(None, policy), num_shards, policy)
        length = 64 // num_shards
        span = (rank % num_shards * length, (rank % num_shards + 1) * length)
        handle, received = exchange.reduce(contributions[rank].clone(), span, "a bucket")
        handle.wait()
        handle.wait()
        assert handle.is_done()
        found.append(torch.equal(received, expected[slice(*span)]))
    return found


def test_all_ways_to_reduce_give_the_same_sums() -> None:
    assert run_ranks(_sums, WORLD) == [[True] * 4] * WORLD


def _trains(policies: list[ZeroPolicy], accumulation: int) -> list[tuple[dict[str, torch.Tensor], set[int], int]]:
    found = []
    for policy in policies:
        model = Net()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        partition = zpartition.shard(model, optimizer, policy=policy)
        records: list[zcomm.Record] = []
        with zcomm.traced(records):
            for step in data():
                for index, micro in enumerate(step[:accumulation]):
                    with partition.micro_step(is_last=index == accumulation - 1):
                        (model(micro[zcomm.group_rank()]) / accumulation).backward()
                kept = partition.finish_gradients()
                total = torch.tensor([sum(float(part.double().square().sum()) for part in kept)], dtype=torch.float64)
                partition.sum_over_shards(total)
                assert total.item() > 0
                partition.apply(optimizer.step, any_unused=True)
                partition.zero_grad()
        spans = [
            r
            for r in records
            if r.op in ("all_gather", "reduce_scatter") and r.label.startswith(("weights", "gradients"))
        ]
        sizes = {record.group_size for record in spans}
        held = partition.ledger()["accumulators"]
        partition.close()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found.append((weights | {"norm of the last step": total}, sizes, held))
    return found


@pytest.mark.parametrize("accumulation", [1, 3])
def test_hybrid_sharding_trains_as_one_group_does(accumulation: int) -> None:
    common = {"bucket_numel": 2000, "unit_numel": 2000, "persist_numel": 20, "max_live_numel": 0}
    policies = [ZeroPolicy(stage=s, shard_group_size=g, **common) for s in (1, 2, 3) for g in (0, 2, 1)]
    for results in run_ranks(_trains, WORLD, policies, accumulation):
        expected = results[0][0]
        for policy, (found, sizes, _) in zip(policies, results):
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=2e-5, atol=1e-6, msg=f"{policy}: {name}")
            assert sizes <= {policy.shard_group_size or WORLD}, "spans travel inside one copy only"
        by_size = {policy.shard_group_size or WORLD: held for policy, (_, _, held) in zip(policies, results)}
        assert by_size[4] < by_size[2], "smaller groups hold more of each copy"


def _starts_alike() -> torch.Tensor:
    torch.manual_seed(zcomm.group_rank())
    model = nn.Linear(30, 30)
    partition = zpartition.shard(model, policy=ZeroPolicy(stage=3, shard_group_size=2, persist_numel=0))
    with pytest.raises(ValueError, match="edited inside gathered"), zpartition.gathered(model), torch.no_grad():
        model.weight.add_(zcomm.group_rank())
    with zpartition.gathered(model, modifier_rank=3), torch.no_grad():
        model.weight.add_(zcomm.group_rank())
    partition.close()
    return model.weight.detach()


def test_edits_and_first_weights_reach_all_copies() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(30, 30).weight.detach() + 3
    assert all(torch.equal(found, expected) for found in run_ranks(_starts_alike, WORLD))
