"""A small engine for tests of what engines do, on one rank or several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zengine

__all__ = ["Regression", "rank_batch", "small_engine"]


class Regression(nn.Module):
    """Two layers of 21 parameters, the same on all ranks; (rows, 3) -> the loss, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.tail = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(torch.tanh(self.body(x)))
        return out.square().mean()


def small_engine(model: nn.Module | None = None, **config: Any) -> zengine.Engine:
    """An engine with SGD, without clipping, for micro-batches of two rows; `config` adds keys and replaces others."""
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return zengine.initialize(model=model or Regression(), config={**base, **config})[0]


def rank_batch(index: int) -> Tensor:
    """(2, 3): other rows for each index and rank."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return torch.linspace(-1, 1 + index + rank, 6).view(2, 3)
