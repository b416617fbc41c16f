"""Unshard hooks with missing gradients: least recently used units are released, and never read after that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy

WIDTH, DEPTH = 24, 6
STRICT = ZeroPolicy(stage=3, unit_numel=1300, persist_numel=0, max_live_numel=0, prefetch_numel=0)


class Half(nn.Module):
    """A unit of which the half gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.rests = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.used(x))


class Fused(torch.autograd.Function):
    """x times each of several weights: one node of autograd that reads the weights of several units at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        return sum(x @ weight for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        return sum(grads[0] @ weight.T for weight in weights), *(x.T @ grads[0] for _ in weights)


class Reads(nn.Module):
    """A part of every block's weights in one node."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.Sequential(*(Half() for _ in range(DEPTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain
        return self.blocks(Fused.apply(x, *(block.used.weight for block in self.blocks))) * self.gain


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.Sequential(*(Half() for _ in range(DEPTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x * self.gain) * self.gain


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _trains(kind: type[nn.Module]) -> tuple[dict[str, torch.Tensor], int, int, list[str]]:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    partition = zpartition.shard(model, optimizer, policy=STRICT)
    log: Any = []
    for step in range(3):
        log.clear()
        with zcomm.traced(log), partition.micro_step():
            loss = model(inputs(step, zcomm.group_rank())).square().sum()
            partition.unsharder.pool.clear()  # what is left in backward is taken again at once
            loss.backward()
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=True)
        partition.zero_grad()
    planned = zpartition.plan(kind(), policy=STRICT, world_size=2).gathered_units
    gathers = [record.label for record in log if record.op == "all_gather"]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return weights, 4 * partition.unsharder.peak_numel, planned, gathers


def expected(kind: type[nn.Module]) -> dict[str, torch.Tensor]:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        (sum(model(inputs(step, rank)).square().sum() for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_units_that_wait_for_gradients_in_vain_make_room() -> None:
    weights = expected(Stack)
    for found, peak, planned, gathers in run_ranks(_trains, 2, Stack):
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)
        assert peak <= planned
        assert gathers.count("weights of unit ''") == 2, "what encloses the others stays"
        assert len(gathers) == 2 * (DEPTH + 1), "each unit on the way forward and on the way back"


def test_a_node_that_reads_many_units_finds_them_all() -> None:
    weights = expected(Reads)
    for found, _, _, _ in run_ranks(_trains, 2, Reads):
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", [Stack, Reads])
def test_the_models_here_have_gradients_that_do_not_come(kind: type[nn.Module]) -> None:
    model = kind()
    model(inputs(0, 0)).sum().backward()
    assert model.blocks[0].rests.weight.grad is None
