"""Sequence and expert parallelism together, at every ZeRO stage, with and without accumulation.

Curves equal those of one process.  With accumulation the gradients of embeddings are sparse rows.  The other pairs
are in test_tensor_pairs.py and test_pipeline_pairs.py.

[Note: the bound]  Losses are near 3 in float32; sums over tokens, heads and experts have other orders.  Three clipped
steps of AdamW turn this into 1e-6 (see test_tensor_engine.py); 2e-5 is allowed.  A part that is missing, counted
twice or misplaced differs by 1e-3 or more.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import zcomm
import zengine
from zcomm.testing import run_ranks
from zpartition.experts import ExpertMLP, MoE
from zpartition.layout.model_parallel import expert_shards_of
from zpartition.sequence import DistributedAttention, sequence_cross_entropy

TOKENS, WIDTH, LENGTH, HEADS = 29, 16, 8, 4
STEPS, CLIP, BOUND = 3, 0.3, 2e-5
CELLS = [(stage, accumulation) for stage in range(4) for accumulation in (1, 3)]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def cross_entropy_of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


class First(nn.Module):
    """Embed tokens; `begin` is the position of this rank's first token."""

    def __init__(self, begin: int = 0, *, sparse: bool = False) -> None:
        super().__init__()
        self.begin = begin
        self.embed, self.place = (nn.Embedding(size, WIDTH, sparse=sparse) for size in (TOKENS, LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens) + self.place(self.begin + torch.arange(tokens.shape[1]))
        return x


class Layer(nn.Module):
    """Attention and four experts."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        options: dict[str, Any] = {"drop_tokens": False, "top2_2nd_expert_sampling": False}
        self.moe = MoE(WIDTH, ExpertMLP(WIDTH, 8, "gelu"), 4, k=2, **options)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = (layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(self.attend(*heads).transpose(1, 2).flatten(2))
        mixture: Tensor = self.moe(self.norm2(x))[0]
        return x + mixture


def model_of(group: ProcessGroup | None = None, *, sparse: bool = False) -> nn.Sequential:
    """Make the model.  group: sequence ranks; None for one process."""
    torch.manual_seed(3)
    size, rank = (zcomm.group_size(group), zcomm.group_rank(group)) if group else (1, 0)
    attend = DistributedAttention(causal, group, scatter_idx=1, gather_idx=2) if size > 1 else causal
    ends = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False))
    return nn.Sequential(First(rank * (LENGTH // size), sparse=sparse), Layer(attend), Layer(attend), ends)


def samples(step: int, replica: int, accumulation: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of each micro-step."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    drawn = [torch.randint(TOKENS, (2, LENGTH + 1), generator=generator) for _ in range(accumulation)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def alone(replicas: int, accumulation: int) -> list[float]:
    """Return losses and norms of a plain loop."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    found = []
    for step in range(STEPS):
        total = 0.0
        for replica in range(replicas):
            for tokens, labels in samples(step, replica, accumulation):
                loss = cross_entropy_of_tokens(model(tokens), labels) / (accumulation * replicas)
                loss.backward()
                total += loss.item()
        found += [total, nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def config(stage: int, accumulation: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "sparse_gradients": accumulation > 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, "stage3_unit_size": 900},
        "sequence_parallel_size": 2,
        "expert_parallel": {"enabled": True, "autoep_size": 2},
    }


def train(stage: int, accumulation: int) -> list[float]:
    groups = zcomm.Groups.of(zcomm.Degrees(sequence=2, expert=2))
    group, piece = groups.sequence(), groups.ranks("sequence").index(groups.rank)
    model, found = model_of(group, sparse=accumulation > 1), []
    with zengine.initialize(model=model, config=config(stage, accumulation))[0] as engine:
        assert expert_shards_of(model)  # sharded
        assert sum(bucket.is_sparse for bucket in engine.parts.partition.layout.buckets) == 2 * (accumulation > 1)
        for step in range(STEPS):
            for tokens, labels in samples(step, engine.parts.groups.get_data_parallel_rank(), accumulation):
                logits = engine(tokens.chunk(2, 1)[piece])
                engine.backward(sequence_cross_entropy(logits, labels.chunk(2, 1)[piece], group))
                report = engine.step()
            found += [report.loss, report.grad_norm]
    return found


def _curves() -> dict[tuple[int, int], list[float]]:
    return {cell: train(*cell) for cell in CELLS}


def test_both_splits_together_have_the_curves_of_one_process() -> None:
    expected = {accumulation: alone(replicas=2, accumulation=accumulation) for _, accumulation in CELLS}
    assert min(norm for curve in expected.values() for norm in curve[1::2]) > CLIP  # clips
    for found in run_ranks(_curves, 4):
        for cell, curve in found.items():
            assert curve == pytest.approx(expected[cell[1]], rel=BOUND), cell
