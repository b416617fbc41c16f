"""Small models for tests of compression, and configs with some techniques."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention whose number of heads follows from the weights."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_width)
        q, k, v = (layer(x).view(shape).transpose(-2, -3) for layer in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Decoder(nn.Module):
    """Embedding, blocks and a head; returns logits, or the loss if there are labels."""

    def __init__(self, layers: int = 2, width: int = 16, vocabulary: int = 12, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Pictures(nn.Module):
    """Two convolutions with a norm between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


def tokens(seed: int = 0, *shape: int) -> Tensor:
    return torch.randint(0, 12, shape or (3, 5), generator=torch.Generator().manual_seed(seed))


def technique(shared: dict[str, Any], *groups: dict[str, Any]) -> dict[str, Any]:
    named = {f"g{number}": group for number, group in enumerate(groups)}
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": named}


def group(modules: list[str], related: list[list[str]] | None = None, **params: Any) -> dict[str, Any]:
    beside = {} if related is None else {"related_modules": related}
    return {"params": params, "modules": modules, **beside}


def weights(*groups: dict[str, Any], **shared: Any) -> dict[str, Any]:
    return {"weight_quantization": technique({"quantize_weight_in_forward": True, **shared}, *groups)}


def config(section: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "compression_training": section,
        **others,
    }
