"""FLOPs of progressive layer drop: what steps compute, against the law over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zengine
from zengine.features.layer_drop import LayerDrop, theta_at

DEPTH, WIDTH, STEPS, COUNTED = 12, 16, 2000, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def counted_steps(engine: zengine.Engine, steps: int) -> Iterator[int]:
    """Yield the FLOPs of forward and backward of each step."""
    for step in range(steps):
        tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
        with FlopCounterMode(display=False) as counter:
            engine.backward(engine(tokens))
        yield counter.get_total_flops()
        engine.step()


def law(gamma: float, steps: int) -> float:
    """Return the share of block FLOPs that the law leaves, mean over the steps of a run."""
    kept = [
        1 - layer / DEPTH * (1 - theta_at(max(step - 1, 0), 0.5, gamma))
        for step in range(steps)
        for layer in range(DEPTH)
    ]
    return math.fsum(kept) / len(kept)


@pytest.mark.parametrize("gamma", [0.001, 0.01])
def test_block_flops_of_a_run_fall_as_the_law_says(gamma: float) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": gamma, "layers": "blocks", "seed": 22},
    }
    engine = zengine.initialize(model=GPT(), config=config)[0]
    drop = next(feature for feature in engine._features if isinstance(feature, LayerDrop))
    kept = [sum(drop.keeps(layer, step) for layer in range(DEPTH)) for step in range(STEPS)]
    flops = list(counted_steps(engine, COUNTED))
    engine.close()
    assert kept[0] == DEPTH
    block = 3 * 2 * (12 * WIDTH**2 + 2 * 8 * WIDTH) * 2 * 8  # forward and twice as much backward; 2 x 8 tokens
    rest = flops[0] - DEPTH * block
    assert rest == 3 * 2 * WIDTH * 32 * 2 * 8, "the output layer"
    assert flops == [rest + block * number for number in kept[:COUNTED]]
    assert min(kept[:COUNTED]) < DEPTH
    assert abs(sum(kept) / (DEPTH * STEPS) - law(gamma, STEPS)) < 0.001


def test_the_law_over_a_run_is_that_of_the_paper() -> None:
    assert law(0.001, 2000) == pytest.approx(
        1 - 0.5 * (1 - (1 - math.exp(-2)) / 2) * (DEPTH - 1) / (2 * DEPTH), rel=1e-3
    )
    assert law(0.01, 200_000) == pytest.approx(1 - 0.5 * (DEPTH - 1) / (2 * DEPTH), rel=1e-3)
