"""Tensors large enough for zero-copy messages: all stages equal one process, and each other bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy

STEPS = 3


class Net(nn.Module):
    """About 400,000 parameters: units and buckets of tens to hundreds of thousands."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(500, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(2)
        )
        self.head = nn.Linear(128, 500, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 500, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


def train(stage: int, dtype: torch.dtype, max_live_numel: int) -> dict[str, torch.Tensor]:
    model = Net().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy = ZeroPolicy(stage=stage, unit_numel=150_000, persist_numel=1000, max_live_numel=max_live_numel)
    partition = zpartition.shard(model, optimizer, policy=policy)
    for step in range(STEPS):
        with partition.micro_step():
            model(tokens(step, zcomm.group_rank())).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    return {name: tensor.float().clone() for name, tensor in model.state_dict().items()}


def _all_stages(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    return [train(stage, dtype, live) for stage, live in ((0, 0), (1, 0), (2, 0), (3, 0), (3, 10**9))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 4])
def test_large_tensors_train_alike_at_every_stage(world_size: int, dtype: torch.dtype) -> None:
    results = run_ranks(_all_stages, world_size, dtype)
    first = results[0][0]
    for by_stage in results:
        for found in by_stage:
            assert all(torch.equal(found[name], tensor) for name, tensor in first.items())
    if dtype is torch.float32:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            for rank in range(world_size):
                (model(tokens(step, rank)) / world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=2e-5)
