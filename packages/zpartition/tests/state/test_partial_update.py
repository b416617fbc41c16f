"""A shard whose parameters are used in different steps is updated as its parameters would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zpartition
from zpartition.state.counts import ALIKE, labels_of
from zpartition.state.unused import partial_update

LAYERS = 4
# Layers that each step uses: one late, one now and then, one never.
USED = [(0,), (0, 1), (0,), (0, 3), (3,), (0, 1, 3), (1,), (0, 1, 3)]
Make = Callable[[Any], torch.optim.Optimizer]


class Counting(torch.optim.Optimizer):
    """Counts in Python, as optimizers from elsewhere do, and steps by the count."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            param -= 0.1 / state["step"] * param.grad


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "SGD, dampened": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD, bare": lambda params: torch.optim.SGD(params, lr=0.1),
    "Counting": Counting,
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(9, 9) for _ in range(LAYERS)))


def run(module: nn.Sequential, finish: Callable[[], None], used: list[tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(1)
    for layers in used:
        hidden = torch.randn(5, 9, generator=generator)
        for index in layers:
            hidden = hidden + torch.tanh(module[index](hidden))
        hidden.square().mean().backward()
        finish()


def plain(make: Make, used: list[tuple[int, ...]] = USED) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    module = model()
    optimizer = make(module.parameters())

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    run(module, finish, used)
    return module, optimizer


def partitioned(make: Make, used: list[tuple[int, ...]] = USED) -> tuple[zpartition.Partition, torch.optim.Optimizer]:
    module = model()
    optimizer = make(module.parameters())
    partition = zpartition.shard(module, optimizer)

    def finish() -> None:
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=partition.num_unused() > 0)
        partition.zero_grad()

    run(module, finish, used)
    return partition, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_state_are_those_of_a_plain_loop_bit_for_bit(name: str) -> None:
    module, oracle = plain(OPTIMIZERS[name])
    partition, optimizer = partitioned(OPTIMIZERS[name])
    assert len(partition.holders) == 1
    for (param_name, ours), theirs in zip(partition.module.named_parameters(), module.parameters()):
        assert torch.equal(ours, theirs), param_name
    if name == "Counting":
        return  # a checkpoint holds tensors
    found = {(key, s.name): s.tensor for key, s in zpartition.state_shards(optimizer, partition.holders)}
    params = dict(module.named_parameters())
    expected = {
        (key, param_name): value
        for param_name, param in params.items()
        for key, value in oracle.state.get(param, {}).items()
        if value is not None
    }
    assert found.keys() == expected.keys(), "and what was never used has none"
    for key, value in expected.items():
        assert torch.equal(found[key], value.reshape(-1)), key


def test_while_all_agree_the_optimizer_has_the_shard_and_nothing_else() -> None:
    partition, optimizer = partitioned(OPTIMIZERS["AdamW"], [(0, 1, 2, 3)] * 3)
    (holder,) = partition.holders
    assert optimizer.state[holder.tensor].keys() == {"step", "exp_avg", "exp_avg_sq"}
    holder.tensor.grad = torch.zeros_like(holder.tensor)
    before = optimizer.param_groups[0]["params"]
    with partial_update(optimizer, partition.holders):
        assert optimizer.param_groups[0]["params"] is before
        assert set(before) == {holder.tensor}


def test_parts_are_runs_of_what_has_had_the_same_updates() -> None:
    partition, optimizer = partitioned(OPTIMIZERS["AdamW"], [(0, 1, 2, 3), (0, 1), (0, 1)])
    (holder,) = partition.holders
    members = optimizer.param_groups[0]["params"]
    assert labels_of(optimizer.state[holder.tensor], 8) == [1, 1, 1, 1, 2, 2, 2, 2]  # layers 3 and 2, then 1 and 0
    holder.tensor.grad = torch.ones_like(holder.tensor)
    with partial_update(optimizer, partition.holders, frozenset({"0.bias"})):
        parts = optimizer.param_groups[0]["params"]
        assert [len(optimizer.state[part]) for part in parts] == [3, 3, 3]
        assert [int(optimizer.state[part]["step"]) for part in parts] == [1, 3, 3]
        assert holder.tensor not in set(parts)
    assert optimizer.param_groups[0]["params"] is members
    assert set(optimizer.state) == {holder.tensor}


def test_a_step_that_fails_leaves_the_optimizer_its_shards() -> None:
    partition, optimizer = partitioned(OPTIMIZERS["AdamW"], [(0, 1, 2, 3), (0,)])
    (holder,) = partition.holders
    entry = {key: value.clone() for key, value in optimizer.state[holder.tensor].items()}
    holder.tensor.grad = torch.ones_like(holder.tensor)
    with pytest.raises(RuntimeError, match="on purpose"), partial_update(optimizer, partition.holders):
        raise RuntimeError("on purpose")
    assert set(optimizer.param_groups[0]["params"]) == {holder.tensor}
    assert set(optimizer.state) == {holder.tensor}
    assert all(torch.equal(optimizer.state[holder.tensor][key], value) for key, value in entry.items())


def test_a_shard_nobody_uses_keeps_nothing() -> None:
    module = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])
    groups = [{"params": list(layer.parameters())} for layer in module]
    optimizer = torch.optim.AdamW(groups)
    partition = zpartition.shard(module, optimizer)
    module[0](torch.ones(1, 9)).sum().backward()
    partition.finish_gradients()
    partition.apply(optimizer.step, any_unused=True)
    unused = next(h for h in partition.holders if h.pieces[0].slot.name.startswith("1."))
    assert unused.tensor not in optimizer.state
    assert len(optimizer.state) == 1


class Codebook(Counting):
    """Keeps something whose elements belong to no parameter's."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["codebook"] = torch.zeros(16)


def test_state_that_cannot_be_shared_out_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match=r"state 'codebook' of Codebook for \S+ has shape \(16,\), neither"):
        partitioned(Codebook, [(0, 1, 2, 3), (0,)])


def test_codes_of_what_rests_stay_bit_for_bit(coded_momentum: Any) -> None:
    """Parameters begin where blocks do, so no block is of two."""
    partition, optimizer = partitioned(coded_momentum, [(0, 1, 2, 3)])
    (holder,) = partition.holders
    assert all(piece.offset % coded_momentum.block_numel == 0 for piece in holder.pieces)
    before = {key: value.clone() for key, value in optimizer.state[holder.tensor].items()}
    holder.tensor.grad = torch.ones_like(holder.tensor)
    unused = frozenset({"2.weight", "0.bias"})
    with partial_update(optimizer, partition.holders, unused):
        optimizer.step()
    after = optimizer.state[holder.tensor]
    for piece in holder.pieces:
        row = slice(piece.offset, piece.offset + piece.numel)
        assert torch.equal(after["codes"][row], before["codes"][row]) == (piece.slot.name in unused)
    assert set(after["step"].tolist()) == {1, 2}
    assert ALIKE in after


def test_adagrad_whose_state_is_made_with_it_begins_anew_with_what_a_checkpoint_lacks() -> None:
    make: Make = lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.5)  # noqa: E731
    partition, optimizer = partitioned(make, [(0, 1, 2, 3)] * 2)
    kinds = {"sum": (torch.float32, (9, 9)), "step": (torch.float32, None)}
    staged = zpartition.make_state(optimizer, partition.holders, lambda name: kinds if name.startswith("0") else {})
    for key, shard in staged.shards():
        shard.tensor.fill_(7 if key == "step" else 2)
    staged.hand_over()
    (holder,) = partition.holders
    holder.tensor.grad = torch.ones_like(holder.tensor)
    with partial_update(optimizer, partition.holders):
        optimizer.step()
    found = {(key, s.name): s.tensor for key, s in zpartition.state_shards(optimizer, partition.holders)}
    assert (found["step", "0.weight"].item(), found["sum", "0.weight"][0].item()) == (8, 3)
    assert (found["step", "1.weight"].item(), found["sum", "1.weight"][0].item()) == (1, 1.5)
