"""A model of five blocks of different sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """Five blocks; the third is the largest, and the last norm is shared with the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 32)
        self.blocks = nn.ModuleList(Block(width) for width in (40, 64, 96, 64, 40))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 11)

    def forward(self, ids: Tensor, skips: bool = False) -> Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            if not (skips and index == 2):
                x = block(x)
        return self.head(self.norm(x))


IDS = torch.arange(20).view(2, 10) % 11


def held(model: nn.Module) -> list[bool]:
    """Which blocks have weights."""
    return [bool(block.norm.weight.numel()) for block in model.blocks]
