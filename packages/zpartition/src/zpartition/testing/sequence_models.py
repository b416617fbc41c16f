"""Small language model for tests of sequence parallelism, with a choice of attention and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import gelu, scaled_dot_product_attention

from zpartition.sequence.chunked import chunked_cross_entropy
from zpartition.sequence.losses import mean_over_sequence
from zpartition.sequence.ring import ring_attention
from zpartition.sequence.splits import Order
from zpartition.sequence.tiles import tiled
from zpartition.sequence.ulysses import DistributedAttention

VOCABULARY, WIDTH, LENGTH = 31, 16, 12

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Mean = Callable[[Tensor, Tensor], Tensor]  # of the sum of losses and the number of tokens that count


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, (batch, heads, tokens, width), over whole sequences."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def ulysses(group: ProcessGroup | None) -> Attention:
    """Return causal attention over pieces of sequences, by Ulysses."""
    return DistributedAttention(causal, group, scatter_idx=1, gather_idx=2)


def ring(group: ProcessGroup | None, order: Order = Order.ZIGZAG) -> Attention:
    """Return causal attention over pieces of sequences, by ring attention."""
    return lambda q, k, v: ring_attention(q, k, v, group, is_causal=True, order=order)


def own_mean(total: Tensor, count: Tensor) -> Tensor:
    """Mean over this rank's tokens."""
    return total / count


def mean_over(group: ProcessGroup | None) -> Mean:
    """Mean over the tokens of all ranks."""
    return lambda total, count: mean_over_sequence(total, count, group)


class SequenceBlock(nn.Module):
    """(batch, tokens, WIDTH) -> the same; four query heads share two key-value heads."""

    def __init__(self, attention: Attention, num_tiles: int) -> None:
        super().__init__()
        self.attention, self.num_tiles = attention, num_tiles
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.num_heads, self.num_key_value_heads, self.head_dim = 4, 2, WIDTH // 4
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = self.attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + torch.cat(tiled(self._mlp, [self.norm2(x)], self.num_tiles), 1)

    def _mlp(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(gelu(self.up(x)))
        return y


class Reader(nn.Module):
    """Map tokens, labels and positions, (batch, tokens) each, to the mean of the losses."""

    def __init__(self, attention: Attention = causal, mean: Mean = own_mean, num_tiles: int = 1) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.mean, self.tile_tokens = mean, 2 * LENGTH // num_tiles
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(SequenceBlock(attention, num_tiles) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, shift_labels: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        for block in self.blocks:
            x = block(x)
        total = chunked_cross_entropy(
            self.norm(x), self.head.weight, shift_labels, reduction="sum", tile_tokens=self.tile_tokens
        )
        return self.mean(total, (shift_labels != -100).sum())


def samples(count: int, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Yield batches of two sequences, a pattern with noise; a third of the labels is ignored, unevenly."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, VOCABULARY, (2, 1), generator=generator)
        noise = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
        is_noise = torch.rand(2, LENGTH, generator=generator) < 0.2
        tokens = torch.where(is_noise, noise, (starts + 3 * torch.arange(LENGTH)) % VOCABULARY)
        ignored = torch.rand(2, LENGTH, generator=generator) < torch.linspace(0, 0.6, LENGTH)
        yield {"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)}
