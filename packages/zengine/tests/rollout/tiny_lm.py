"""A tiny decoder with its loss, as people write them, and engines over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zengine

VOCABULARY, WIDTH, HEADS, TIME = 29, 16, 2, 48


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.heads = max(HEADS, width // 64)
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in "qkv")
        self.out = nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.shrink(F.gelu(self.grow(self.two(x))))


class TinyLM(nn.Module):
    """Logits, (batch, time, vocabulary); with targets the loss."""

    def __init__(self, width: int = WIDTH, num_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(TIME, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def config(stage: int = 0, **changes: Any) -> dict[str, Any]:
    sections = {"hybrid_engine": {"enabled": True, "max_out_tokens": 40}}
    zero = {"stage": stage, "stage3_unit_size": 100, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero if stage == 3 else {"stage": stage},
        **sections,
        **changes,
    }


def engine_of(stage: int = 0, model: nn.Module | None = None, **changes: Any) -> Any:
    return zengine.initialize(model=model or TinyLM(), config=config(stage, **changes))[0]


def train(engine: Any, steps: int) -> list[float]:
    """Train some steps on this rank's tokens; return the losses."""
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + engine.global_rank)
        ids = torch.randint(0, VOCABULARY, (2, 13), generator=generator)
        loss = engine(ids[:, :-1], ids[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
