"""The active fraction of experts, declared by our layers and by blocks of other libraries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zpartition.experts import ExpertMLP, MoE, active_fractions


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        self.up = nn.Parameter(torch.zeros(8, 4, 4))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


class Block(nn.Module):
    def __init__(self, **attributes: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 8), Stack()
        for name, value in attributes.items():
            setattr(self.gate, name, value)


def test_the_active_fraction_is_k_of_the_experts() -> None:
    layer = MoE(4, ExpertMLP(4, 4), 4, k=2, use_residual=True)
    found = active_fractions(nn.Sequential(nn.Linear(4, 4), layer))
    assert found == {id(param): 0.5 for param in layer.experts.parameters()}  # the residual one sees every token
    assert set(active_fractions(Block(top_k=2)).values()) == {0.25}
    assert set(active_fractions(Block()).values()) == {1.0}  # no module declares k
