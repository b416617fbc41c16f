"""Language model with expert layers for tests, and its training on one process and on many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zcomm
import zpartition
from zpartition import ZeroPolicy
from zpartition.experts.distribute import distribute
from zpartition.experts.layer import MoE
from zpartition.experts.mlp import ExpertMLP
from zpartition.tensor import whole_state_dict
from zpartition.testing import clip

__all__ = ["CLIP", "STEPS", "MoELanguageModel", "batches", "train", "train_alone"]

VOCABULARY, WIDTH, STEPS, CLIP = 23, 12, 3, 0.5


class MoEBlock(nn.Module):
    """Residual expert layer; appends its auxiliary loss to a list."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), moe

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        y, aux_loss, _ = self.moe(self.norm(x))
        losses.append(aux_loss)
        return x + torch.as_tensor(y)


class MoELanguageModel(nn.Module):
    """(batch, length) tokens -> a scalar loss; four experts a layer, of both kinds, k of 2, 1 and 3.

    The gate of the third layer sends all tokens to few experts, so that some get none, and capacity drops others.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        plain = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        options: dict[str, Any] = {"num_experts": 4, "min_capacity": 2, "use_rts": False}
        self.blocks = nn.ModuleList(
            MoEBlock(moe)
            for moe in (
                MoE(WIDTH, ExpertMLP(WIDTH, 16), k=2, top2_2nd_expert_sampling=False, **options),
                MoE(WIDTH, plain, k=1, use_residual=True, **options),
                MoE(WIDTH, ExpertMLP(WIDTH, 16, "gelu", bias=True), k=1, drop_tokens=False, **options),
            )
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for param in self.parameters():
                param.add_(torch.randn_like(param), alpha=0.1)
            last: Any = self.blocks[2]
            last.moe.gate.weight[1:] = 0.0
            last.norm.bias += 3.0
            last.moe.gate.weight[0] = 0.5
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        losses: list[Tensor] = []
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, losses)
        loss: Tensor = nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        return loss + 0.01 * torch.stack(losses).sum()


def batches(replicas: int, accumulation: int) -> Tensor:
    """Return tokens of (step, micro-step, replica, 2, 7)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (STEPS, accumulation, replicas, 2, 7), generator=generator)


def fingerprint(state: dict[str, Tensor]) -> float:
    """Weigh every element of every tensor differently and return the sum."""
    flat = torch.cat([value.reshape(-1) for value in state.values()])
    return float(flat @ torch.linspace(0.5, 1.5, flat.numel(), dtype=flat.dtype))


def train_alone(replicas: int, accumulation: int) -> tuple[list[float], list[float], float]:
    """Train in plain PyTorch on all data with all experts; returns losses, norms and a fingerprint of the weights."""
    model = MoELanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in batches(replicas, accumulation):
        total = 0.0
        for tokens in step.flatten(0, 1):
            loss = model(tokens) / (replicas * accumulation)
            loss.backward()
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, fingerprint(model.state_dict())


def train(
    expert: int, accumulation: int, policy: ZeroPolicy, data: Any = None
) -> tuple[list[float], list[float], float]:
    """Train on the ranks of `data` (None: all), experts sharded over `expert` ranks; returns as `train_alone`."""
    model = MoELanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # before: parameters keep their identity
    distribute(model, zcomm.consecutive_group(expert, data))
    partition = zpartition.shard(model, optimizer, policy=policy, group=data)
    replicas, replica = zcomm.group_size(data), zcomm.group_rank(data)
    losses, norms = [], []
    for step in batches(replicas, accumulation):
        total = torch.zeros((), dtype=torch.float64)
        for index, micro in enumerate(step):
            with partition.micro_step(is_last=index == accumulation - 1):
                loss = model(micro[replica]) / accumulation
                loss.backward()
            total += loss.detach() / replicas
        norms.append(clip(partition, CLIP))
        partition.apply(optimizer.step)
        partition.zero_grad()
        zcomm.all_reduce(total, data)
        losses.append(float(total))
    mark = fingerprint(whole_state_dict(model))  # gathers at stage 3
    partition.close()
    return losses, norms, mark
