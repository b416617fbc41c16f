"""Unshard hooks: which units are unsharded when, and what autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy

POLICY = ZeroPolicy(stage=3, unit_numel=600, persist_numel=0, max_live_numel=0, prefetch_numel=0)
AHEAD = ZeroPolicy(stage=3, unit_numel=600, persist_numel=0, max_live_numel=0)
KEPT = ZeroPolicy(stage=3, unit_numel=600, persist_numel=0, max_live_numel=1_000_000_000)
DEFAULT = ZeroPolicy(stage=3, unit_numel=600, persist_numel=0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Everything that makes stage 3 hard; `how` says how the blocks are run."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embed = nn.Embedding(9, 12)
        self.places = Places()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(12, 12)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places(tokens.size(1))
        for block in self.blocks:
            x = self._run(block, x)
        x = self.frozen(x) * self.gain
        logits = nn.functional.linear(x, self.embed.weight)  # a parameter of another unit
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.how == "plain":
            return block(x)
        if self.how == "twice":
            return block(block(x))
        return checkpoint(block, x, use_reentrant=self.how == "reentrant")


class Places(nn.Module):
    """Returns a view of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 12))

    def forward(self, length: int) -> torch.Tensor:
        return self.table[:length]


def update(partition: zpartition.Partition, optimizer: torch.optim.Optimizer, *, any_unused: bool = False) -> None:
    """What ends a step."""
    partition.finish_gradients()
    partition.apply(optimizer.step, any_unused=any_unused)
    partition.zero_grad()


def data(steps: int, world_size: int) -> torch.Tensor:
    return torch.randint(0, 9, (steps, 2, world_size, 3, 5), generator=torch.Generator().manual_seed(1))


def train_alone(how: str, world_size: int, steps: int) -> dict[str, torch.Tensor]:
    model = Net(how)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for step in data(steps, world_size):
        for micro in step:
            for tokens in micro:
                (model(tokens) / 2 / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(how: str, policy: ZeroPolicy, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = Net(how)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    partition = zpartition.shard(model, optimizer, policy=policy)
    assert model.embed.weight.shape == (9, 12)
    assert bool(model.embed.weight.isnan().all()), "hollow while it rests"
    for step in data(steps, zcomm.group_size()):
        for index, micro in enumerate(step):
            with partition.micro_step(is_last=index == 1):
                (model(micro[zcomm.group_rank()]) / 2).backward()
            assert partition.unsharder.live_numel == 0, "after a backward nothing is whole"
        update(partition, optimizer, any_unused=True)
    unsharder = partition.unsharder
    facts = {
        "peak": unsharder.peak_numel,
        "largest": max(unit.numel for unit in unsharder.units.values()),
        "buffers": unsharder.pool.total_bytes,
    }
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, facts


@pytest.mark.parametrize("how", ["plain", "twice", "reentrant", "not reentrant"])
@pytest.mark.parametrize("policy", [POLICY, AHEAD, KEPT, DEFAULT], ids=["alone", "prefetch", "kept", "default"])
def test_hard_models_train_like_one_process(how: str, policy: ZeroPolicy) -> None:
    expected = train_alone(how, 2, 4)
    for found, facts in run_ranks(train, 2, how, policy, 4):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=5e-6, atol=5e-6, msg=lambda m, n=name: f"{n}: {m}")
        if policy is POLICY:  # the root's gain, the embedding that it borrows, and one unit
            assert facts["peak"] <= 4 * facts["largest"]


def _fails_then_trains(where: str) -> list[float]:
    model = Net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=POLICY)
    tokens = data(1, 2)[0, 0, zcomm.group_rank()]

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    if where == "forward":
        handle = model.blocks[1].down.register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            model(tokens)
        handle.remove()
    else:
        loss = model(tokens)
        handle = model.blocks[1].up.weight.register_hook(fail)
        with pytest.raises(ArithmeticError), partition.micro_step():
            loss.backward()
        handle.remove()
    assert all(unit.depth == 0 for unit in partition.unsharder.units.values())
    losses = []
    for _ in range(3):
        with partition.micro_step():
            loss = model(tokens)
            loss.backward()
        update(partition, optimizer)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_the_next_step_is_a_clean_one(where: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    tokens = data(1, 2)[0, 0]
    for step in range(3):
        losses = [model(tokens[rank]) for rank in range(2)]
        if step == 2:
            expected = [loss.item() for loss in losses]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [losses[2] for losses in run_ranks(_fails_then_trains, 2, where)]
    assert found == pytest.approx(expected, rel=1e-5)


def _evaluates() -> tuple[float, int, bool]:
    model = Net().eval()
    partition = zpartition.shard(model, policy=POLICY)
    tokens = data(1, 2)[0, 0, 0]
    with torch.no_grad():
        value = model(tokens).item()
        again = model(tokens).item()
    return value, partition.unsharder.live_numel, value == again


def test_evaluation_needs_no_backward_and_leaves_nothing_whole() -> None:
    with torch.no_grad():
        expected = Net()(data(1, 2)[0, 0, 0]).item()
    for value, live, same in run_ranks(_evaluates, 2):
        assert (value, live, same) == (pytest.approx(expected, rel=1e-6), 0, True)


def _reads_outside() -> tuple[torch.Size, bool]:
    model = Net()
    partition = zpartition.shard(model, policy=POLICY)
    shape = model.embed.weight.shape if zcomm.group_rank() == 0 else torch.Size((9, 12))
    zcomm.barrier()
    return shape, partition.unsharder.live_numel == 0


def test_one_rank_may_look_at_a_parameter_between_steps() -> None:
    assert run_ranks(_reads_outside, 2) == [((9, 12), True)] * 2


def _old_graph() -> None:
    model = Net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=POLICY)
    first, second = (model(data(1, 2)[0, i, zcomm.group_rank()]) for i in range(2))
    with partition.micro_step():
        first.backward()
    update(partition, optimizer)
    with pytest.raises(RuntimeError, match="from before the optimizer's update"), partition.micro_step():
        second.backward()


def test_a_graph_from_before_an_update_is_rejected() -> None:
    run_ranks(_old_graph, 2)


def _messages(policy: ZeroPolicy) -> list[tuple[str, int]]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=policy)
    log: Any = []
    for _ in range(2):
        log.clear()
        with zcomm.traced(log):
            with partition.micro_step():
                model(torch.ones(2, 16)).sum().backward()
            update(partition, optimizer)
    return [(record.op, record.numel) for record in log]


@pytest.mark.parametrize(("policy", "gathers"), [(POLICY, 7), (AHEAD, 7), (KEPT, 4)], ids=["alone", "ahead", "kept"])
def test_the_number_of_messages_is_what_the_theory_says(policy: ZeroPolicy, gathers: int) -> None:
    """Each unit once forward and once backward (but the first layer: it is given no gradient to hand on)."""
    for log in run_ranks(_messages, 2, policy):
        numels = [numel for op, numel in log if op == "all_gather"]
        assert len(numels) == gathers
        reduced = [op for op, numel in log if numel == numels[0] and op != "all_gather"]
        assert len(reduced) == 4


def _closes(keep: bool) -> dict[str, torch.Tensor]:
    model = Net()
    partition = zpartition.shard(model, policy=POLICY)
    parameters = [type(child._parameters) for child in model.modules()]
    partition.close(keep_weights=keep)
    partition.close()
    assert any(kind is not dict for kind in parameters)
    assert all(type(child._parameters) is dict for child in model.modules())
    return dict(model.state_dict())


def test_close_leaves_an_ordinary_module() -> None:
    expected = Net().state_dict()
    for found in run_ranks(_closes, 2, True):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for found in run_ranks(_closes, 2, False):
        assert all(bool(tensor.isnan().all()) for tensor in found.values())


def _compiles() -> list[float]:
    model = Net()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=POLICY)
    losses = []
    for step in data(3, 2):
        with partition.micro_step():
            loss = model(step[0, zcomm.group_rank()])
            loss.backward()
        update(partition, optimizer)
        losses.append(loss.item())
    return losses


def test_compiled_blocks_train_alike(plain_losses: Callable[[], list[list[float]]]) -> None:
    for found, expected in zip(run_ranks(_compiles, 2), plain_losses()):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def plain_losses() -> Callable[[], list[list[float]]]:
    def run() -> list[list[float]]:
        model = Net()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        found: list[list[float]] = [[], []]
        for step in data(3, 2):
            losses = [model(step[0, rank]) for rank in range(2)]
            (sum(losses) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            for rank in range(2):
                found[rank].append(losses[rank].item())
        return found

    return run
