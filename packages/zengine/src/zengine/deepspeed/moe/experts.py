"""`deepspeed.moe.experts`: a list of equal experts for a custom MOELayer; `MoE` stacks their weights instead."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Experts"]


class Experts(nn.Module):
    """Copies of `expert`, with equal weights, of which each computes its chunk of the input."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        """Copy `expert`; its parameters get the marks `allreduce = False` and `group_name`."""
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        for param in self.deepspeed_experts.parameters():
            marked: Any = param
            marked.allreduce, marked.group_name = False, expert_group_name

    def forward(self, inputs: Tensor) -> Tensor:
        """(groups, experts * n, ...) -> the same: chunk i of dim 1 is computed by expert i."""
        chunks = inputs.chunk(self.num_local_experts, dim=1)
        outputs = [expert(chunk) for expert, chunk in zip(self.deepspeed_experts, chunks)]
        return torch.cat([out[0] if isinstance(out, tuple) else out for out in outputs], dim=1)
