"""A GAN as DeepSpeed's example trains it: two engines, modules called past their engines, optimizers stepped by hand.

The discriminator's loss is backpropagated twice before its step; the generator's loss leaves gradients in the
discriminator, which its next `zero_grad()` drops.  Losses equal those of the same loop in plain torch, bit for bit on
one rank, and on two ranks that have the same batches.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks

ROWS, STEPS = 4, 4


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    generator = nn.Sequential(
        nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(True), nn.Linear(8, 6), nn.Tanh()
    )
    critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 1), nn.Sigmoid())
    return generator, critic


def train(stage: int | None, *, by_hand: bool) -> list[float]:
    """Return the losses of both networks; stage None: in plain torch."""
    net_g, net_d = networks()
    by_d: Any = torch.optim.Adam(net_d.parameters(), lr=0.01, betas=(0.5, 0.999))
    by_g: Any = torch.optim.Adam(net_g.parameters(), lr=0.01, betas=(0.5, 0.999))
    engine_d: Any = None
    engine_g: Any = None
    if stage is not None:
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        engine_d, by_d, _, _ = deepspeed.initialize(model=net_d, optimizer=by_d, config=config)
        engine_g, by_g, _, _ = deepspeed.initialize(model=net_g, optimizer=by_g, config=config)

    def backward(engine: Any, loss: torch.Tensor) -> None:
        loss.backward() if engine is None else engine.backward(loss)

    def step(engine: Any, optimizer: Any) -> None:
        optimizer.step() if by_hand or engine is None else engine.step()

    criterion, losses = nn.BCELoss(), []
    numbers = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        net_d.zero_grad()
        real, label = torch.rand(ROWS, 6, generator=numbers), torch.ones(ROWS, 1)
        loss_real = criterion(net_d(real), label)
        backward(engine_d, loss_real)
        fake = net_g(torch.randn(ROWS, 3, generator=numbers))
        loss_fake = criterion(net_d(fake.detach()), label.fill_(0))
        backward(engine_d, loss_fake)
        step(engine_d, by_d)

        net_g.zero_grad()
        loss_g = criterion(net_d(fake), label.fill_(1))
        backward(engine_g, loss_g)
        step(engine_g, by_g)
        losses += [loss_real.item() + loss_fake.item(), loss_g.item()]
    return losses


@functools.cache
def plain() -> list[float]:
    return run_ranks(train, 1, None, by_hand=True)[0]  # in a process with the threads that the ranks have


@pytest.mark.parametrize("by_hand", [False, True], ids=["engine.step", "optimizer.step"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_a_gan_trains_as_in_plain_torch(world: int, stage: int, by_hand: bool):
    for losses in run_ranks(train, world, stage, by_hand=by_hand):
        assert losses == plain()
