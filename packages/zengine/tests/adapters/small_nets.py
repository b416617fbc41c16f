"""A small net, and settings of adapters, for the tests of this folder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zengine.adapters import LoRAConfig


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.fc = nn.Linear(12, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.q_proj(x)))  # type: ignore[no-any-return]


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def filled(module: nn.Module, seed: int = 1) -> None:
    """Give the second matrices, which are zero at first, random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in module.named_parameters():
            if "lora_B" in name:
                param.copy_(torch.randn(param.shape, generator=generator))


def config(*targets: str, rank: int = 3) -> LoRAConfig:
    return LoRAConfig(lora_r=rank, lora_alpha=6.0, target_mods=list(targets))
