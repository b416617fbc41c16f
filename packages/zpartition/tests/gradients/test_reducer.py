"""Gradient reducer: messages, their order, and the accumulators."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
import zpartition
from zcomm.testing import recorded, run_ranks
from zpartition import Averaging, ReduceAt, ZeroPolicy

STAGES = (0, 1, 2)


class Net(nn.Module):
    """Two layers, of which the first is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8))
        self.tail = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.body(self.body(x))).square().mean()


def batches() -> torch.Tensor:
    """Inputs of (step, micro-step, rank)."""
    return torch.randn(4, 2, 2, 3, 8, generator=torch.Generator().manual_seed(5))


def train_alone() -> dict[str, torch.Tensor]:
    """One process that sees the data of both ranks."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for data in batches():
        for micro in data:
            for x in micro:
                (model(x) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def _gradients(policy: ZeroPolicy, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(40, 40, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=policy)
    x = torch.full((1, 40), 1.0 + zcomm.group_rank(), dtype=dtype)
    for index in range(2):
        with partition.micro_step(is_last=index == 1):
            model(x).sum().backward()
    partition.finish_gradients()
    gradients = [(name, tensor.clone()) for name, tensor in partition.named_gradients()]
    partition.apply(optimizer.step)
    return [*gradients, ("weight", model.weight.detach().clone())]


def test_a_sum_over_ranks_is_not_divided():
    policy = ZeroPolicy(stage=2, averaging=Averaging(operation="sum"))
    for result in run_ranks(_gradients, 2, policy, torch.float32):
        assert result[0][1].unique().tolist() == [6.0]  # (1 + 2) twice


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_fp32_and_keeps_fp32_masters(stage, dtype):
    results = run_ranks(_gradients, 2, ZeroPolicy(stage=stage), dtype)
    for gradients in results:
        assert {tensor.dtype for _, tensor in gradients[:-1]} == {torch.float32}
        assert gradients[0][1].unique().tolist() == [3.0]
        assert gradients[-1][1].dtype == dtype
    assert torch.equal(results[0][-1][1], results[1][-1][1])


def _collectives(policy: ZeroPolicy, accumulation: int) -> list[str]:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=policy)

    def step() -> None:
        for index in range(accumulation):
            with partition.micro_step(is_last=index == accumulation - 1):
                model(torch.randn(2, 64)).sum().backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()

    step()  # the first round learns the order, with one exchange
    with recorded() as log:
        step()
    return [f"{record.op} {record.label}" for record in log.records]


@pytest.mark.parametrize(
    ("stage", "reduce_at", "expected"),
    [
        (0, ReduceAt.MICRO_STEP, ["all_reduce"] * 4),
        (0, ReduceAt.BOUNDARY, ["all_reduce"] * 2),
        (1, ReduceAt.BOUNDARY, ["reduce_scatter"] * 2 + ["all_gather"] * 2),
        (2, ReduceAt.MICRO_STEP, ["reduce_scatter"] * 4 + ["all_gather"] * 2),
    ],
)
def test_the_number_and_order_of_collectives_follow_from_the_layout(stage, reduce_at, expected):
    policy = ZeroPolicy(stage=stage, reduce_at=reduce_at, bucket_numel=2 * 64 * 65)
    for found in run_ranks(_collectives, 2, policy, 2):
        reductions = [line for line in found if "gradients" in line]
        assert [line.split()[0] for line in found] == expected
        assert [line.split()[1] for line in reductions] == ["gradients[0]", "gradients[1]"] * (len(reductions) // 2)


class Boom(Exception):
    """Raised inside backward."""


def _after_an_exception(policy: ZeroPolicy, fail_at: int) -> dict[str, torch.Tensor]:
    """The second micro-step of step 2 fails in backward; the step is then done again from its first micro-step."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    partition = zpartition.shard(model, optimizer, policy=policy)

    def explode(_grad: torch.Tensor) -> None:
        raise Boom

    def run_micro_steps(step: int, data: torch.Tensor, failing: bool) -> None:
        for index, micro in enumerate(data):
            with partition.micro_step(is_last=index == 1):
                loss = model(micro[zcomm.group_rank()]) / 2
                if failing and index == fail_at:
                    hidden = model.body[0].weight.register_hook(explode)
                    try:
                        loss.backward()
                    finally:
                        hidden.remove()
                loss.backward()

    for step, data in enumerate(batches()):
        if step == 2:
            with pytest.raises(Boom):
                run_micro_steps(step, data, True)
        run_micro_steps(step, data, False)
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("fail_at", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_after_an_exception_in_backward_the_step_can_be_done_again(stage, fail_at):
    policy = ZeroPolicy(stage=stage, bucket_numel=350)
    failed = run_ranks(_after_an_exception, 2, policy, fail_at)
    assert all(torch.equal(failed[0][name], failed[1][name]) for name in failed[0])
    expected = train_alone()
    for name, tensor in expected.items():
        torch.testing.assert_close(failed[0][name], tensor, rtol=5e-6, atol=5e-6)


def _after_the_world_has_failed(stage: int) -> None:
    """Rank 1 gives up; rank 0 fails then, too, with buckets on the wire that rank 1 has no part in."""
    model = Net()
    policy = ZeroPolicy(stage=stage)
    partition = zpartition.shard(model, torch.optim.SGD(model.parameters()), policy=policy)
    zcomm.all_reduce(torch.zeros(1))
    if zcomm.group_rank() == 1:
        zcomm.abort("no more of it")
        return

    def fail_at_last() -> None:
        with partition.micro_step(is_last=True):
            model(batches()[0, 0, 0]).backward()
            assert partition.reducer.flights
            while not zcomm.failure():
                time.sleep(0.02)
            raise Boom

    with pytest.raises(Boom):
        fail_at_last()
    partition.close()


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_that_will_never_come_are_not_waited_for(stage):
    run_ranks(_after_the_world_has_failed, 2, stage)


def _several_backwards(policy: ZeroPolicy) -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    partition = zpartition.shard(model, optimizer, policy=policy)
    for data in batches():
        for micro in data:  # two losses, two backwards, one step: both are the last micro-step
            with partition.micro_step(is_last=True):
                (model(micro[zcomm.group_rank()]) / 2).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("reduce_at", list(ReduceAt))
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_several_backwards_add_up(stage, reduce_at):
    if stage == 2 and reduce_at is ReduceAt.BOUNDARY:
        pytest.skip("refused at construction")
    expected = train_alone()
    policy = ZeroPolicy(stage=stage, bucket_numel=350, reduce_at=reduce_at)
    for found in run_ranks(_several_backwards, 2, policy):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=5e-6, atol=5e-6)


def _reentrant(policy: ZeroPolicy) -> list[torch.Tensor]:
    """A shared layer inside two re-entrant checkpoints: its gradient arrives twice in one backward."""
    torch.manual_seed(0)
    layer, head = nn.Linear(64, 64), nn.Linear(64, 1)
    model = nn.ModuleList([layer, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=policy)
    generator = torch.Generator().manual_seed(zcomm.group_rank())
    for _ in range(2):
        with partition.micro_step():
            hidden = torch.randn(3, 64, generator=generator, requires_grad=True)
            for _ in range(2):
                hidden = checkpoint(lambda x: torch.tanh(layer(x)), hidden, use_reentrant=True)
            head(hidden).sum().backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_arrives_twice_in_one_backward_counts_twice(stage):
    torch.manual_seed(0)
    layer, head = nn.Linear(64, 64), nn.Linear(64, 1)
    optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.1)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(2):
        for generator in generators:
            hidden = torch.randn(3, 64, generator=generator)
            for _ in range(2):
                hidden = torch.tanh(layer(hidden))
            (head(hidden).sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(_reentrant, 2, ZeroPolicy(stage=stage, bucket_numel=100)):
        for mine, theirs in zip(found, [*layer.parameters(), *head.parameters()]):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def _adversaries(policy: ZeroPolicy) -> list[torch.Tensor]:
    """The generator's backward flows through the discriminator, outside of the discriminator's rounds."""
    torch.manual_seed(0)
    maker, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (maker, critic)]
    parts = [zpartition.shard(m, o, policy=policy) for m, o in pairs]
    noise = torch.full((2, 4), 1.0 + zcomm.group_rank())
    for _ in range(3):
        for (module, optimizer), partition in zip(pairs, parts):
            partition.zero_grad()
            with partition.micro_step():
                score = critic(maker(noise) if module is maker else maker(noise).detach())
                (-score if module is maker else score).mean().backward()
            partition.finish_gradients()
            partition.apply(optimizer.step)
            partition.zero_grad()
    return [p.detach().clone() for m in (maker, critic) for p in m.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_from_outside_a_round_are_left_alone(stage):
    torch.manual_seed(0)
    maker, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (maker, critic)]
    for _ in range(3):
        for module, optimizer in pairs:
            optimizer.zero_grad()
            for rank in range(2):
                noise = torch.full((2, 4), 1.0 + rank)
                score = critic(maker(noise) if module is maker else maker(noise).detach())
                ((-score if module is maker else score).mean() / 2).backward()
            optimizer.step()
    for found in run_ranks(_adversaries, 2, ZeroPolicy(stage=stage)):
        for mine, theirs in zip(found, [*maker.parameters(), *critic.parameters()]):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def _late_on_one_rank() -> list[torch.Tensor]:
    """Rank 0 alone uses a re-entrantly checkpointed layer twice, from the first step on."""
    torch.manual_seed(0)
    layer, head = nn.Linear(64, 64), nn.Linear(64, 1)
    model = nn.ModuleList([layer, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=ZeroPolicy(stage=2, bucket_numel=100))
    for _ in range(3):
        with partition.micro_step():
            hidden = torch.ones(3, 64, requires_grad=True)
            for _ in range(2 - zcomm.group_rank()):
                hidden = checkpoint(lambda x: torch.tanh(layer(x)), hidden, use_reentrant=True)
            head(hidden).sum().backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_ranks_agree_on_what_is_sent_twice_when_only_one_of_them_needs_it():
    first, second = run_ranks(_late_on_one_rank, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def _buffers(kind: str) -> tuple[list[int], int]:
    """Bytes of buffers at the end of each of five backwards, and what is planned; a bucket for each layer."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
    policy = ZeroPolicy(stage=2, bucket_numel=1060)
    planned = zpartition.plan(layers, policy=policy, world_size=2).buckets
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    partition = zpartition.shard(layers, optimizer, policy=policy)
    found = []
    for step in range(5):
        misses = step > 0 and (kind == "missing" or (kind == "missing on one rank" and zcomm.group_rank() == 1))
        with partition.micro_step():
            hidden = torch.ones(3, 32, requires_grad=True)
            for layer in layers[:7]:
                hidden = torch.tanh(layer(hidden))
            for _ in range(0 if misses else 2 if kind == "late" else 1):
                hidden = checkpoint(lambda x: torch.tanh(layers[7](x)), hidden, use_reentrant=True)
            hidden.sum().backward()
            found.append(partition.ledger()["buckets"])
        partition.finish_gradients()
        assert partition.ledger()["buckets"] <= planned
        partition.apply(optimizer.step, any_unused=kind != "late")
        partition.zero_grad()
    return found, planned


@pytest.mark.parametrize("kind", ["late", "missing", "missing on one rank"])
def test_a_bucket_that_leaves_late_does_not_hold_up_those_behind_it(kind: str) -> None:
    for found, planned in run_ranks(_buffers, 2, kind):
        assert max(found[2:]) <= planned, found  # the order is learnt from the steps before
