"""Gradients among other launches: positions that ranks agree on, whatever gradients a rank gets."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import zcomm
import zpartition
from zcomm.testing import recorded, run_ranks
from zpartition import ZeroPolicy
from zpartition.gradients.launch_order import END, START, LaunchClock, Level, Position

WIDTH, LAYERS, STEPS = 8, 4, 5
POLICY = ZeroPolicy(stage=2, bucket_numel=WIDTH * WIDTH)  # a bucket for each layer


class Launch(Function):
    """The identity, whose backward launches a sum, as tensor-parallel layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        zcomm.all_reduce(torch.zeros(1), ctx.group, label="other")
        return grad, None


def data(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(layers: nn.Sequential, step: int, rank: int, group: Any = None) -> Tensor:
    """Step 1: rank 1 has no gradient of layer 2.  Step 3: rank 0 runs the layers backwards."""
    x, found = data(step, rank), list(layers)
    for index, layer in enumerate(reversed(found) if (step, rank) == (3, 0) else found):
        weight = layer.weight.detach() if (step, rank, index) == (1, 1, 2) else layer.weight
        x = torch.tanh(nn.functional.linear(x, weight))
        x = x if group is None else Launch.apply(x, group)
    return x.square().mean()


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def train(policy: ZeroPolicy, is_expected: bool, asks: bool) -> tuple[list[list[str]], list[Tensor]]:
    """Return the launches of each step, in their order, and the weights."""
    layers, group = make(), zcomm.duplicate_group()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    partition = zpartition.shard(layers, optimizer, policy=policy)
    if is_expected:  # exchanges in forward say that backward launches something, too
        zcomm.all_to_all(torch.zeros(2), torch.zeros(2), group)
    found = []
    for step in range(STEPS):
        with recorded() as log:
            with partition.micro_step():
                loss_of(layers, step, zcomm.group_rank(), group).backward()
            if asks:
                partition.finish_gradients()
            else:
                partition.finish_gradients(any_late=False)
                late = torch.tensor([float(partition.num_late())])
                zcomm.all_reduce(late, label="sum")
                if late:
                    partition.finish_gradients(any_late=True)
        partition.apply(optimizer.step)
        partition.zero_grad()
        found.append([record.label for record in sorted(log.records, key=lambda record: record.index)])
    partition.close()
    return found, [param.detach().clone() for param in layers.parameters()]


def train_alone() -> list[Tensor]:
    layers = make()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    for step in range(STEPS):
        for rank in range(2):
            (loss_of(layers, step, rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in layers.parameters()]


BUCKETS = [f"gradients[{index}]" for index in range(LAYERS)]
BESIDE = [label for bucket in BUCKETS[:-1] for label in ("other", bucket)] + ["other", BUCKETS[-1]]


@pytest.mark.parametrize("is_expected", [False, True])
def test_ranks_launch_in_one_order_whatever_gradients_they_have(is_expected: bool) -> None:
    (first, weights), (second, _) = run_ranks(train, 2, POLICY, is_expected, True)
    assert first == second
    without = [[label for label in step if not label.startswith(("exchange", "late"))] for step in first]
    assert without[0] == ["other"] * LAYERS + BUCKETS, "no position is known"
    assert without[1] == without[2] == BESIDE
    assert without[3] == [*BESIDE, *BUCKETS[:2]], "what came too late is sent again"
    assert without[4] == [*["other"] * 3, BUCKETS[2], "other", BUCKETS[3], *BUCKETS[:2]], "and last from then on"
    assert ["late gradients" in step for step in first] == [False, True, True, True, True]
    for mine, theirs in zip(weights, train_alone()):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_sum_of_the_caller_says_whether_gradients_are_late() -> None:
    for found, weights in run_ranks(train, 2, POLICY, True, False):
        assert ["late gradients" in step for step in found] == [False, False, False, True, False]
        for mine, theirs in zip(weights, train_alone()):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_where_backwards_launch_nothing_else_buckets_leave_as_they_arrive() -> None:
    for found, _ in run_ranks(_without_launches, 2):
        assert found == [BUCKETS] * 2


def _without_launches() -> tuple[list[list[str]], int]:
    layers = make()
    partition = zpartition.shard(layers, torch.optim.SGD(layers.parameters(), lr=0.1), policy=POLICY)
    found = []
    for step in range(2):
        with recorded() as log:
            with partition.micro_step():
                loss_of(layers, step, 0).backward()
                assert partition.reducer._next == LAYERS, "all have left when backward returns"
            partition.finish_gradients()
        partition.zero_grad()
        labels = [record.label for record in sorted(log.records, key=lambda record: record.index)]
        found.append([label for label in labels if not label.startswith("exchange")])
    return found, 0


def _at_stage_3() -> tuple[list[int], int, list[list[str]]]:
    """Return the bytes of gradient buffers in each backward, and those that are planned; and the launches."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    policy = ZeroPolicy(stage=3, persist_numel=0, unit_numel=1060, max_live_numel=0)
    planned = zpartition.plan(layers, policy=policy, world_size=2).buckets
    partition = zpartition.shard(layers, torch.optim.SGD(layers.parameters(), lr=0.1), policy=policy)
    sizes, found = [], []
    for _ in range(3):
        with recorded() as log, partition.micro_step():
            partition.module(torch.ones(3, 32)).sum().backward()
            sizes.append(partition.ledger()["buckets"])
        partition.finish_gradients()
        partition.zero_grad()
        found.append([record.label for record in sorted(log.records, key=lambda record: record.index)])
    return sizes, planned, found


def test_gradients_of_units_leave_beside_the_first_backward_too() -> None:
    (sizes, planned, found), (_, _, other) = run_ranks(_at_stage_3, 2)
    assert found == other
    assert max(sizes) <= planned, sizes
    for step in found:
        last_gather = max(index for index, label in enumerate(step) if label.startswith("weights"))
        assert sum(label.startswith("gradients") for label in step[:last_gather]) >= 4


def clock(seen: list[Position]) -> LaunchClock:
    return LaunchClock(frozenset({0, 1}), before=seen.append)


def test_a_launch_advances_its_digit_and_clears_those_behind_it() -> None:
    seen: list[Position] = []
    one = clock(seen)
    one.tick(Level.REPLICAS)
    assert not seen, "no backward runs"
    one.start()
    one.tick(Level.REPLICAS)
    assert not seen, "autograd does not run yet"
    one.begin()
    for level in (Level.OTHERS, Level.TENSOR, Level.TENSOR, Level.OTHERS, Level.REPLICAS, Level.EXPERTS):
        one.tick(level)
    assert seen == [(0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 2, 0), (0, 0, 2, 1), (1, 0, 0, 0), (1, 1, 0, 0)]
    assert seen[0] > START
    assert seen == sorted(seen)
    assert seen[-1] < END


def test_launches_of_other_threads_and_in_pauses_do_not_count() -> None:
    seen: list[Position] = []
    one = clock(seen)
    one.start()
    one.begin()
    other = threading.Thread(target=one.tick, args=(Level.OTHERS,))
    other.start()
    other.join()
    with one.paused():
        one.tick(Level.OTHERS)
    assert not seen
    one.stop()
    one.tick(Level.OTHERS)
    assert not seen
