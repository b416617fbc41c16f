"""Gradients that arrive after their bucket was sent: the message of the norm says so, and their step counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import zcomm
import zengine
from zcomm.testing import recorded, run_ranks

WIDTH, STEPS, CLIP = 8, 5, 0.05
CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_clipping": CLIP,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


class Launch(Function):
    """The identity, whose backward launches a collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        zcomm.all_reduce(torch.zeros(1), label="other")
        return grad


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, *, is_reversed: bool = False) -> Tensor:
        for layer in reversed(self.layers) if is_reversed else self.layers:
            x = Launch.apply(torch.tanh(layer(x)))
        return x.square().mean()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """In step 2 rank 1 runs the layers in the other order."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x, is_reversed=(step, rank) == (2, 1))


def train(stage: int) -> tuple[list[float], list[bool]]:
    zero = {"stage": stage, "reduce_bucket_size": WIDTH * (WIDTH + 1)}
    engine, *_ = zengine.initialize(model=Layers(), config={**CONFIG, "zero_optimization": zero})
    norms, late = [], []
    for step in range(STEPS):
        with recorded() as log:
            engine.backward(loss_of(engine, step, zcomm.group_rank()))
            norms.append(engine.step().grad_norm)
        late.append("late gradients" in [record.label for record in log.records])
    engine.close()
    return norms, late


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_counts_gradients_that_arrive_late(stage: int) -> None:
    model, expected = Layers(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    assert min(expected) > CLIP
    for norms, late in run_ranks(train, 2, stage):
        assert late == [False, False, True, False, False], "agreement costs a message where there are such gradients"
        assert norms == pytest.approx(expected, rel=1e-5)
