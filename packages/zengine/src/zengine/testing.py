"""Testing tools: a small engine on any number of ranks, and the resume contract of loaders."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import zengine
from zengine.data import forever

__all__ = ["Regression", "check_resumes", "rank_batch", "saved", "small_engine", "take"]


class Regression(nn.Module):
    """Two linear layers with 21 parameters, equal on all ranks; forward maps (rows, 3) to the loss, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.tail = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(torch.tanh(self.body(x)))
        return out.square().mean()


def small_engine(model: nn.Module | None = None, **config: Any) -> zengine.Engine:
    """Return an engine with SGD and without clipping, for micro-batches of two rows; `config` adds keys."""
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return zengine.initialize(model=model or Regression(), config={**base, **config})[0]


def rank_batch(index: int) -> Tensor:
    """Return a (2, 3) batch that differs by index and rank."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return torch.linspace(-1, 1 + index + rank, 6).view(2, 3)


def take(loader: Any, count: int) -> list[Any]:
    """Return the next `count` batches of a loader as lists, across epochs."""
    return [batch.tolist() if isinstance(batch, Tensor) else batch for batch in islice(forever(loader), count)]


def saved(loader: Any) -> Any:
    """Return a loader's state as a checkpoint stores it."""
    return json.loads(json.dumps(loader.state_dict()))


def check_resumes(make: Callable[..., Any], stop: int, ahead: int, **of_the_killed: Any) -> None:
    """Assert that a loader continues exactly from the state of one that stopped after `stop` batches.

    ahead: number of batches compared after the resume.  of_the_killed: arguments of `make` for the stopped one only.
    """
    uninterrupted, killed, resumed = take(make(), stop + ahead), make(**of_the_killed), make()
    assert take(killed, stop) == uninterrupted[:stop]
    resumed.load_state_dict(saved(killed))
    assert take(resumed, ahead) == uninterrupted[stop:]
