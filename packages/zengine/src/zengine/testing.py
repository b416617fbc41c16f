"""For tests: a small engine, on one rank or several, and what every loader has to do."""

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


def take(loader: Any, count: int) -> list[Any]:
    """The next batches of a loader, over epochs, as lists."""
    return [batch.tolist() if isinstance(batch, Tensor) else batch for batch in islice(forever(loader), count)]


def saved(loader: Any) -> Any:
    """A loader's state as a checkpoint keeps it."""
    return json.loads(json.dumps(loader.state_dict()))


def check_resumes(make: Callable[..., Any], stop: int, ahead: int, **of_the_killed: Any) -> None:
    """A new loader that loads the state of one killed after `stop` batches goes on as if nothing had happened, for
    `ahead` batches; AssertionError if it does not.  of_the_killed: arguments of `make` for that one alone.
    """
    uninterrupted, killed, resumed = take(make(), stop + ahead), make(**of_the_killed), make()
    assert take(killed, stop) == uninterrupted[:stop]
    resumed.load_state_dict(saved(killed))
    assert take(resumed, ahead) == uninterrupted[stop:]
