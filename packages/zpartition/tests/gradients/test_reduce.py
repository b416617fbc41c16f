"""Gradients summed over all ranks, over those that hold one copy, and over both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ReduceAt, ZeroPolicy
from zpartition.gradients.reduce import GRADIENT_BLOCK, reduction_for
from zpartition.layout.ranks import Ranks

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
        exchange = reduction_for(Ranks.of(None, policy), num_shards, policy)
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


def _trains(
    policies: list[ZeroPolicy], accumulation: int
) -> list[tuple[dict[str, torch.Tensor], set[int], int, int]]:
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
        num_sums = sum(record.label.startswith("gradients[") for record in records)
        held = partition.ledger()["accumulators"]
        partition.close()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found.append((weights | {"norm of the last step": total}, sizes, held, num_sums))
    return found


@pytest.mark.parametrize("accumulation", [1, 3])
def test_hybrid_sharding_trains_as_one_group_does(accumulation: int) -> None:
    common = {"bucket_numel": 2000, "unit_numel": 2000, "persist_numel": 20, "max_live_numel": 0}
    moments = [(1, ReduceAt.MICRO_STEP), (1, ReduceAt.BOUNDARY), (2, ReduceAt.MICRO_STEP), (3, ReduceAt.MICRO_STEP)]
    policies = [
        ZeroPolicy(stage=stage, reduce_at=moment, shard_group_size=size, **common)
        for stage, moment in moments
        for size in (0, 2, 1)
    ]
    for results in run_ranks(_trains, WORLD, policies, accumulation):
        expected = results[0][0]
        for policy, (found, sizes, _, _) in zip(policies, results):
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=2e-5, atol=1e-6, msg=f"{policy}: {name}")
            assert sizes <= {policy.shard_group_size or WORLD}, "spans travel inside one copy only"
        by_size = {policy.shard_group_size or WORLD: held for policy, (_, _, held, _) in zip(policies, results)}
        assert by_size[4] < by_size[2], "smaller groups hold more of each copy"
        num_sums = [number for *_, number in results]
        assert num_sums[:3] == [accumulation * number for number in num_sums[3:6]], "at the boundary, once"


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


NUMEL = 4096


def _addends(rank: int) -> torch.Tensor:
    """Magnitudes from 1e-3 to 1e3 along the bucket."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    return values * torch.logspace(-3, 3, NUMEL)


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Of each element's block."""
    return values.view(-1, GRADIENT_BLOCK).abs().amax(dim=1).repeat_interleave(GRADIENT_BLOCK)


def _sums_in_few_bits() -> None:
    rank = zcomm.group_rank()
    everyone = [_addends(r) for r in range(WORLD)]
    for bits, shard_size, hop in ((4, 0, 0), (8, 0, 0), (4, 0, 2), (8, 0, 2), (4, 2, 0)):
        policy = ZeroPolicy(stage=2, gradient_bits=bits, shard_group_size=shard_size, gradient_hop_size=hop)
        num_shards = shard_size or WORLD
        exchange = reduction_for(Ranks.of(None, policy), num_shards, policy)
        length = NUMEL // num_shards
        span = (rank % num_shards * length, (rank % num_shards + 1) * length)
        with zcomm.traced([]) as records:
            handle, received = exchange.reduce(everyone[rank].clone(), span, "a bucket")
            handle.wait()
        error = (received.double() - torch.stack(everyone).double().sum(0)[slice(*span)]).abs()
        share = zcomm.BlockCode(bits=bits).relative_error * (1 + 1e-3)
        bound = torch.stack([_largest(each) for each in everyone]).sum(0) * share
        if hop:
            runs = [_largest(everyone[i] + everyone[i + 1]) * (1 + 2 * share) for i in (0, 2)]
            bound += (runs[0] + runs[1] + share * bound) * share
        assert bool((error <= bound[slice(*span)]).all()), (bits, shard_size, hop)
        assert error.max() > 0
        codes = [record for record in records if record.dtype == "uint8"]
        assert [record.group_size for record in codes] == ([2, 2] if hop else [num_shards])
        assert codes[-1].nbytes == zcomm.BlockCode(bits=bits, block=GRADIENT_BLOCK).num_bytes(NUMEL // (hop or 1)), (
            "what goes between runs is a run's share of the sum"
        )


def test_sums_in_few_bits_are_within_their_bounds() -> None:
    run_ranks(_sums_in_few_bits, WORLD)


def _meets_infinity(value: float) -> list[bool]:
    """One rank's gradient is not finite: some rank keeps it so, and the statistics show it to all."""
    found = []
    for hop in (0, 2):
        model = Net()
        policy = ZeroPolicy(stage=3, gradient_bits=4, gradient_hop_size=hop, persist_numel=20, unit_numel=2000)
        partition = zpartition.shard(model, policy=policy)
        with partition.micro_step():
            loss = model(data()[0, 0, zcomm.group_rank()])
            (loss * (value if zcomm.group_rank() == 2 else 1.0)).backward()
        total = torch.tensor([float(sum(part.sum() for part in partition.finish_gradients()))])
        partition.sum_over_shards(total)
        found.append(bool(total.isfinite()))
        partition.zero_grad()
        partition.close()
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_overflow_is_seen_through_few_bits(value: float) -> None:
    assert run_ranks(_meets_infinity, WORLD, value) == [[False, False]] * WORLD


def _fits(policies: list[ZeroPolicy]) -> list[float]:
    """The last loss of a regression under each policy."""
    found = []
    for policy in policies:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        partition = zpartition.shard(model, optimizer, policy=policy)
        for step in range(40):
            x = torch.randn(32, 8, generator=torch.Generator().manual_seed(4 * step + zcomm.group_rank()))
            with partition.micro_step():
                loss = (model(x) - x[:, :3].sum(1, keepdim=True).tanh()).pow(2).mean()
                loss.backward()
            partition.finish_gradients()
            partition.apply(optimizer.step)
            partition.zero_grad()
        zcomm.all_reduce(loss := loss.detach())
        found.append(loss.item() / WORLD)
        partition.close()
    return found


def test_training_converges_in_few_bits() -> None:
    tiny = {"persist_numel": 0, "unit_numel": 100}
    policies = [
        ZeroPolicy(stage=3, **tiny),
        ZeroPolicy(stage=1, gradient_bits=4),
        ZeroPolicy(stage=3, gradient_bits=4, weight_bits=8, secondary_group_size=2, gradient_hop_size=2, **tiny),
    ]
    exact, *others = run_ranks(_fits, WORLD, policies)[0]
    assert exact < 0.05, "from 0.5, about the variance of the target"
    for policy, loss in zip(policies[1:], others):
        assert abs(loss - exact) < 0.02, policy
    with pytest.raises(ValueError, match=r"stage=0, gradient_bits=4\): at stage 0 every rank keeps all gradients"):
        ZeroPolicy(stage=0, gradient_bits=4)


class _Optional(nn.Module):
    """A unit with a bias that a rank may not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 32) / 6), nn.Parameter(torch.zeros(32))

    def forward(self, x: torch.Tensor, uses_bias: bool) -> torch.Tensor:
        y = torch.tanh(x @ self.weight)
        return y + self.bias if uses_bias else y


def _goes_another_way(policy: ZeroPolicy) -> list[torch.Tensor]:
    """From the second step on, rank 1 misses a gradient that comes early in backward: its bucket leaves last."""
    torch.manual_seed(0)
    units = nn.ModuleList(_Optional() for _ in range(7))
    partition = zpartition.shard(units, policy=policy)
    found = []
    for step in range(3):
        uses = step == 0 or zcomm.group_rank() == 0
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(zcomm.group_rank()))
        with partition.micro_step():
            for index, unit in enumerate(units):
                x = unit(x, uses or index < 6)
            x.sum().backward()
        partition.finish_gradients()
        found.append(zpartition.safe_get_full_grad(units[6].bias))
        partition.zero_grad()
        if zcomm.group_rank() == 0:
            assert partition.ledger()["buckets"] <= 3 * 4096 * 4, "what was taken rather than wait is dropped"
    partition.close()
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("fields", [{}, {"gradient_bits": 8}, {"shard_group_size": 2, "gradient_bits": 8}], ids=str)
def test_ranks_that_gather_and_reduce_do_not_wait_in_a_circle(fields: dict[str, int]) -> None:
    policy = ZeroPolicy(stage=3, unit_numel=1100, persist_numel=0, max_live_numel=0, prefetch_numel=0, **fields)
    world_size = 2 if "shard_group_size" not in fields else 4
    share = {2: 0.5, 4: 0.25}[world_size]
    for first, *others in run_ranks(_goes_another_way, world_size, policy):
        torch.testing.assert_close(first, torch.full((32,), 4.0), rtol=0.01, atol=0)
        for other in others:
            torch.testing.assert_close(other, torch.full((32,), 4.0 * share), rtol=0.01, atol=0)


class _Looks(nn.Module):
    """Rows of a table through layers, the last of which a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 32, sparse=True)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(5)])

    def forward(self, tokens: torch.Tensor, uses_last: bool) -> torch.Tensor:
        hidden = self.table(tokens)
        for layer in self.layers[: 5 if uses_last else 4]:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden.square().mean()


def _looks_up(policy: ZeroPolicy) -> torch.Tensor:
    """From the second step on, the second copy misses the gradients that are awaited first."""
    model = _Looks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=policy)
    for step in range(3):
        with partition.micro_step():
            model(torch.arange(3), step == 0 or zcomm.group_rank() < 2).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    partition.close()
    return model.table.weight.detach()


@pytest.mark.parametrize("stage", [1, 2])
def test_rows_leave_after_the_sums_between_copies(stage: int) -> None:
    policy = ZeroPolicy(stage=stage, shard_group_size=2, bucket_numel=1000)
    model = _Looks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.table.sparse = False
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(WORLD):
            (model(torch.arange(3), step == 0 or rank < 2) / WORLD).backward()
        optimizer.step()
    for found in run_ranks(_looks_up, WORLD, policy):
        torch.testing.assert_close(found, model.table.weight.detach(), rtol=1e-5, atol=1e-6)
