"""The model of the training bench: GPT-2's shapes, nothing else of it."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPT", "TINY", "Block", "Shape", "Tiny", "batch", "make"]


@attrs.frozen
class Shape:
    """124M parameters with the defaults."""

    depth: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 1024


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> the same."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token ids (batch, tokens) -> mean cross entropy of each next token."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """() loss."""
        x = self.embed(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Tiny(nn.Module):
    """Many blocks of two small layers: what a step costs beside its arithmetic."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("waves", torch.linspace(0.1, 3.0, shape.width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(shape.width, shape.width), nn.ReLU(), nn.Linear(shape.width, shape.width))
            for _ in range(shape.depth)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """() loss."""
        x = torch.sin(tokens.unsqueeze(-1) * self.waves).to(self.blocks[0][0].weight.dtype)
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


TINY = Shape(depth=48, width=64, heads=0)


def make(shape: Shape) -> GPT | Tiny:
    """The model of a shape: without heads there is no attention."""
    return GPT(shape) if shape.heads else Tiny(shape)


def batch(shape: Shape, size: int, tokens: int, seed: int) -> Tensor:
    """(size, tokens) ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.vocabulary, (size, tokens), generator=generator)
