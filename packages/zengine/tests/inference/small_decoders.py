"""Small decoders, written as people write them: each computes something else in one place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, TIME = 37, 24, 4, 64
SIZE = WIDTH // HEADS


class Block(nn.Module):
    """Pre-norm, learnt or rotary positions, heads in one projection."""

    def __init__(self, rotary: bool, softcap: float, window: int, parallel: bool) -> None:
        super().__init__()
        self.heads, self.softcap, self.window, self.parallel, self.rotary = HEADS, softcap, window, parallel, rotary
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.grow, self.shrink = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.qkv(self.one(x)).chunk(3, dim=-1)
        )
        if self.rotary:
            query, key = turn(query, cos, sin), turn(key, cos, sin)
        scores = query @ key.transpose(-1, -2) / SIZE**0.5
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        mixed = torch.softmax(scores.masked_fill(~self.seen(x.shape[1]), -torch.inf), -1) @ value
        attended = self.out(mixed.transpose(1, 2).flatten(2))
        given = x if self.parallel else x + attended
        return x + attended + self.shrink(F.silu(self.grow(self.two(given))))

    def seen(self, time: int) -> Tensor:
        """(time, time) bool: the keys that each query sees."""
        distance = torch.arange(time)[:, None] - torch.arange(time)
        return (distance >= 0) & (distance < (self.window or time))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours."""
    one, two = x[..., ::2], x[..., 1::2]
    return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)


class Model(nn.Module):
    """Logits of the next token, (batch, time, 37)."""

    def __init__(
        self, *, rotary: bool = True, softcap: float = 0.0, window: int = 0, parallel: bool = False, **given: Any
    ) -> None:
        super().__init__()
        self.rotary = rotary
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = None if rotary else nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(given.get("block", Block)(rotary, softcap, window, parallel) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        places = torch.arange(ids.shape[1])
        if self.places is not None:
            x = x + self.places(places)
        angles = torch.outer(places, 10_000.0 ** -torch.arange(0, 1, 2 / SIZE))
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


def model(**given: Any) -> Model:
    """A model with weights that matter: three times as large as torch's, and gains that differ."""
    torch.manual_seed(0)
    made = Model(**given).eval()
    with torch.no_grad():
        for param in made.parameters():
            param.mul_(3) if param.dim() > 1 else param.add_(torch.randn_like(param) / 5)
    return made
