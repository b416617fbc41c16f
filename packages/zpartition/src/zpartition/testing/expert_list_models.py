"""Models for tests whose experts are an `nn.ModuleList`, called by loops of several kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KINDS", "ListMoE", "ListModel"]

KINDS = ("all", "hit", "dense", "backwards")
WIDTH = 8


class Gated(nn.Module):
    """An expert: (rows, hidden) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.Linear(WIDTH, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return y


class ListMoE(nn.Module):
    """Two of four experts for each token, computed by a loop of one of `KINDS`."""

    def __init__(self, kind: str, num_experts: int = 4) -> None:
        super().__init__()
        self.kind, self.top_k = kind, 2
        self.gate = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(..., hidden) -> the same shape, and the router's logits."""
        flat, kind = x.reshape(-1, x.shape[-1]), self.kind
        logits = self.gate(flat)
        weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        if kind == "dense":  # all tokens through all experts
            share = torch.zeros_like(logits).scatter(1, chosen, weights)
            y = torch.stack([expert(x).view_as(flat) for expert in self.experts], dim=1)
            return (y * share[..., None]).sum(1).view_as(x), logits
        y = torch.zeros_like(flat)
        order = range(len(self.experts)) if kind == "all" else chosen.unique().tolist()  # or those with tokens
        for index in reversed(order) if kind == "backwards" else order:
            tokens, slots = torch.where(chosen == index)
            rows = self.experts[index](flat[None, tokens] if kind == "all" else flat[tokens])
            y.index_add_(0, tokens, rows.reshape(-1, x.shape[-1]) * weights[tokens, slots, None])
        return y.view_as(x), logits


class ListModel(nn.Module):
    """Residual layers of the given kinds; (batch, length, hidden) -> a loss."""

    def __init__(self, kinds: tuple[str, ...] = KINDS) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(ListMoE(kind) for kind in kinds)
        self.last = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for layer in self.layers:
                gate: Any = layer.gate
                gate.weight[0] += 1.0  # experts have unequal numbers of tokens, and some have none
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        balance = x.new_zeros(())
        for layer in self.layers:
            y, logits = layer(x)
            x, balance = x + y, balance + logits.square().mean()
        loss: Tensor = self.last(x).square().mean() + 0.01 * balance
        return loss
