"""Traffic plan: the formulas of the papers, and that a live step sends as much."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import TrafficPlan, ZeroPolicy

SHARDED = ZeroPolicy(stage=3, persist_numel=0, max_live_numel=0, unit_numel=70_000)


WIDTH = 256


class Language(nn.Module):
    """An embedding, blocks, and a head that may be tied to the embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(320, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(6))
        self.head = nn.Linear(WIDTH, 320, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x[:, 0].abs().long())
        for block in self.blocks:
            x = block(x).tanh()
        y: torch.Tensor = self.head(x)
        return y.square().mean()


class Net(nn.Module):
    """Blocks whose backward needs all their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def planned(policy: ZeroPolicy, world_size: int, num_backwards: int = 1) -> TrafficPlan:
    with torch.device("meta"):
        model = Net()
    return zpartition.plan_traffic(model, policy=policy, world_size=world_size, num_backwards=num_backwards)


@pytest.mark.parametrize(("stage", "share"), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.5)])
@pytest.mark.parametrize("world_size", [2, 64])
def test_the_laws_of_the_paper(stage: int, share: float, world_size: int) -> None:
    policy = attrs.evolve(SHARDED, stage=stage)
    assert planned(policy, world_size).share == pytest.approx(share)


def test_weights_that_may_stay_are_gathered_once() -> None:
    assert planned(attrs.evolve(SHARDED, max_live_numel=10**9), 8).share == pytest.approx(1.0)


def test_accumulation_multiplies_what_travels_in_every_micro_step() -> None:
    assert planned(ZeroPolicy(stage=2), 8, num_backwards=4).share == pytest.approx(0.5 * 4 + 0.5)
    assert planned(SHARDED, 8, num_backwards=4).share == pytest.approx(1.5 * 4)
    once = ZeroPolicy(stage=1, reduce_at=zpartition.ReduceAt.BOUNDARY)
    assert planned(once, 8, num_backwards=4).share == pytest.approx(1.0)


def test_a_rank_alone_sends_nothing() -> None:
    assert planned(SHARDED, 1) == TrafficPlan((), 0)


def test_zero_plus_plus_divides() -> None:
    full = planned(SHARDED, 64).total_bytes
    few = attrs.evolve(SHARDED, weight_bits=8, gradient_bits=4, gradient_hop_size=8, secondary_group_size=8)
    flows = {flow.what: flow for flow in planned(few, 64).flows}
    crossing = flows["weights of units, first all-gather"], flows["gradients in 4 bits, between nodes"]
    assert sum(flow.num_bytes for flow in crossing) < full / 4  # the paper's claim, of what leaves a node
    assert flows["weights of units, again in a node"].among == 8
    assert flows["gradients in 4 bits, inside nodes"].num_bytes == pytest.approx(
        flows["gradients in 4 bits, between nodes"].num_bytes * 8, rel=0.01
    )


def test_copies_add_the_sums_of_their_spans() -> None:
    flows = {flow.what: flow for flow in planned(attrs.evolve(SHARDED, shard_group_size=8), 64).flows}
    assert flows["gradients, reduce-scatter"].among == 8
    scattered = flows["gradients, reduce-scatter"].num_bytes
    assert flows["sums of copies, all-reduce"].num_bytes == pytest.approx(2 * scattered / 8)


BLOCK, HEAD = WIDTH * WIDTH, 320 * WIDTH  # elements
PER_ELEMENT = 4 / 2  # bytes: float32, through one of two ranks


@pytest.mark.parametrize(
    ("max_live", "twice"),
    [
        (0, 6 * BLOCK + HEAD),  # the lookup of an embedding needs no weights in backward
        (HEAD + 3 * BLOCK, 3 * BLOCK + HEAD),  # the embedding and three blocks stay
        (2 * HEAD + 6 * BLOCK, 0),
    ],
)
def test_only_what_may_not_stay_is_gathered_twice(max_live: int, twice: int) -> None:
    policy = attrs.evolve(SHARDED, unit_numel=100_000, max_live_numel=max_live, prefetch_numel=0)
    with torch.device("meta"):
        model = Language(tied=False)
    flows = {flow.what: flow for flow in zpartition.plan_traffic(model, policy=policy, world_size=2).flows}
    gathered = flows["weights of units, all-gather"]
    assert gathered.num_bytes == PER_ELEMENT * (2 * HEAD + 6 * BLOCK + twice)


def test_what_is_used_again_too_late_does_not_stay() -> None:
    near, far = (
        planned(attrs.evolve(SHARDED, max_live_numel=10**9, max_reuse_numel=numel), 2) for numel in (10**9, 2 * BLOCK)
    )
    assert far.total_bytes - near.total_bytes == 2 * BLOCK * PER_ELEMENT  # the first two of four


def test_gradients_that_travel_narrow_count_narrow() -> None:
    policy = ZeroPolicy(stage=2, narrow_classes=("Linear",), narrow_dtype=torch.bfloat16)
    flows = {flow.what: flow for flow in planned(policy, 2).flows}
    assert flows["gradients, reduce-scatter"].num_bytes == 4 * BLOCK * PER_ELEMENT / 2
    assert flows["updated weights, all-gather"].num_bytes == 4 * BLOCK * PER_ELEMENT


MODELS = {"net": Net, "untied": lambda: Language(tied=False), "tied": lambda: Language(tied=True)}


def _sent(policies: list[ZeroPolicy], kind: str = "net") -> list[tuple[int, int]]:
    """(messages, bytes through a rank) of the second step under each policy."""
    found = []
    for policy in policies:
        torch.manual_seed(0)
        model = MODELS[kind]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        partition = zpartition.shard(model, optimizer, policy=policy)
        for _ in range(2):
            records: list[zcomm.Record] = []
            with zcomm.traced(records.append):
                for _ in range(2):
                    with partition.micro_step():
                        model(torch.ones(3, 256, requires_grad=True)).backward()
                partition.finish_gradients()
                partition.apply(optimizer.step)
                partition.zero_grad()
        partition.close()
        ours = [each for each in records if each.label.startswith(("gradients", "weights"))]
        through = sum(
            (2 if r.op == "all_reduce" else 1) * r.nbytes * (r.group_size - 1) // r.group_size for r in ours
        )
        found.append((len(ours), through))
    return found


def test_a_live_step_sends_what_the_plan_says() -> None:
    policies = [attrs.evolve(SHARDED, stage=stage) for stage in range(4)]
    for counted in run_ranks(_sent, 2, policies):
        for policy, (num_messages, num_bytes) in zip(policies, counted):
            plan = planned(policy, 2, num_backwards=2)
            assert num_messages == sum(flow.num_messages for flow in plan.flows), policy.stage
            assert num_bytes == plan.total_bytes, policy.stage


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_a_live_step_gathers_again_what_could_not_stay(kind: str, world_size: int) -> None:
    base = attrs.evolve(SHARDED, unit_numel=100_000)
    policies = [
        attrs.evolve(base, max_live_numel=max_live, max_reuse_numel=max_reuse, prefetch_numel=prefetch)
        for max_live, max_reuse in ((0, 10**9), (200_000, 10**9), (330_000, 10**9), (10**9, 10**9), (10**9, 300_000))
        for prefetch in (0, 150_000)
    ]
    policies += [attrs.evolve(policy, secondary_group_size=2) for policy in policies[:4] if world_size > 2]
    with torch.device("meta"):
        model = MODELS[kind]()
    for policy, (num_messages, num_bytes) in zip(policies, run_ranks(_sent, world_size, policies, kind)[0]):
        plan = zpartition.plan_traffic(model, policy=policy, world_size=world_size, num_backwards=2)
        assert (num_messages, num_bytes) == (sum(flow.num_messages for flow in plan.flows), plan.total_bytes), policy
