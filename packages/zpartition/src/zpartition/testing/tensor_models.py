"""Models for tests of tensor parallelism: several kinds of attention, and a language model around them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from zpartition.tensor import Column, Gather, NormShard, Replicated, Row, Rule, Scatter, TensorPlan, Vocabulary

VOCABULARY, WIDTH = 29, 24


def _tensor(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = module(x)
    return out


class Grouped(nn.Module):
    """Grouped-query attention; three key-value heads do not divide by two."""

    def __init__(self, heads: int = 6, kv_heads: int = 3) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, 4
        self.q_proj = nn.Linear(WIDTH, heads * 4)
        self.k_proj = nn.Linear(WIDTH, kv_heads * 4, bias=False)
        self.v_proj = nn.Linear(WIDTH, kv_heads * 4)
        self.o_proj = nn.Linear(heads * 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return _tensor(self.o_proj, y.transpose(1, 2).reshape(batch, length, -1))


class Blocked(nn.Module):
    """Attention with one weight [q; k; v], as in nanoGPT."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, WIDTH
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.reshape(batch, length, self.n_head, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return _tensor(self.proj, y.transpose(1, 2).reshape(batch, length, -1))


class Interleaved(nn.Module):
    """Attention with one weight of [q; k; v] for each head, as in GPT-NeoX."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_attention_heads = heads
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(x).view(batch, length, self.num_attention_heads, -1)
        q, k, v = (part.transpose(1, 2) for part in heads.chunk(3, dim=-1))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return _tensor(self.dense, y.transpose(1, 2).reshape(batch, length, -1))


class Gated(nn.Module):
    def __init__(self, inner: int = 37) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, inner, bias=False), nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _tensor(self.down, torch.sigmoid(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, inner: int = 37) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), attention
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Gated(inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + _tensor(self.mlp, self.norm2(x))


class Language(nn.Module):
    """One block of each kind between a tied embedding and head; (batch, length) tokens -> a scalar loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(12, WIDTH)
        self.start = nn.Identity()
        self.blocks = nn.ModuleList(Block(make()) for make in (Grouped, Blocked, Interleaved))
        self.norm, self.finish = nn.LayerNorm(WIDTH), nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for param in self.parameters():
                param.add_(torch.randn_like(param), alpha=0.05)
        self.double()

    def features(self, tokens: Tensor) -> Tensor:
        x = self.start(self.embed(tokens) + self.position(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return _tensor(self.finish, self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.features(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


ATTENTIONS = (
    *(Rule(f"blocks.*.attention.{name}_proj", Column()) for name in "qkv"),
    Rule("blocks.*.attention.o_proj", Row()),
    Rule("blocks.*.attention.qkv", Column(blocks=(WIDTH,) * 3)),
    Rule("blocks.*.attention.query_key_value", Column()),
    Rule("blocks.*.attention.proj", Row()),
    Rule("**.dense", Row()),
)
PLAN = TensorPlan(
    [
        *ATTENTIONS,
        Rule("blocks.*.mlp.down", Row()),
        Rule("blocks.*.mlp.*", Column()),
        Rule("embed", Vocabulary()),
        Rule("position", Replicated()),
        Rule("head", Column(gathers=True)),
    ]
)
SEQUENCE = TensorPlan(
    [*PLAN.rules, Rule("start", Scatter()), Rule("**norm*", NormShard(gathers=True))],
    sequence_dim=1,
)
GATHERED = TensorPlan(  # the ends are whole, and see all tokens
    [
        *(rule for rule in PLAN.rules if rule.pattern not in ("embed", "head")),
        *(Rule("start", Scatter()), Rule("blocks.*.norm*", NormShard(gathers=True))),
        *(Rule("norm", NormShard()), Rule("finish", Gather()), Rule("head", Replicated())),
    ],
    sequence_dim=1,
)
