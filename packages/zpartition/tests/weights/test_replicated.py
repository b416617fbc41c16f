"""Replicated parameters and buffers."""

from __future__ import annotations

import torch
from torch import nn

import zcomm
from zcomm.testing import run_ranks
from zpartition.weights.storage import ReplicatedTensors


class Net(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.cut = nn.Parameter(torch.full((3,), value))
        self.whole = nn.Parameter(torch.full((2, 3), value).t(), requires_grad=False)
        self.register_buffer("seen", torch.full((), value))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("scratch", torch.full((2,), value), persistent=False)


def _follow() -> list[dict[str, float]]:
    rank = zcomm.group_rank()
    module = Net(rank + 1.0)
    replicated = ReplicatedTensors.of(module, None, [module.cut])
    assert [name for name, _ in replicated.tensors()] == ["whole", "seen", "count"]
    replicated.synchronise()
    assert module.whole.is_contiguous()
    started = {
        name: float(tensor.double().mean()) for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    module.seen.add_(rank)
    module.count.add_(rank)
    replicated.broadcast_buffers()
    return [started, {name: float(tensor) for name, tensor in replicated.buffers()}]


def test_they_follow_rank_0_and_nothing_else_does() -> None:
    first, second = run_ranks(_follow, 2)
    assert first == [
        {"cut": 1.0, "whole": 1.0, "seen": 1.0, "count": 1.0, "scratch": 1.0},
        {"seen": 1.0, "count": 1.0},
    ]
    assert second[0] == {"cut": 2.0, "whole": 1.0, "seen": 1.0, "count": 1.0, "scratch": 2.0}
    assert second[1] == {"seen": 1.0, "count": 1.0}


def _turned() -> list[float]:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(2, 3))
    replicated = ReplicatedTensors.of(module, None, [])
    replicated.synchronise()
    module.table = (torch.arange(6.0).view(3, 2) + 10 * zcomm.group_rank()).t()  # as a module may in its forward
    replicated.broadcast_buffers()
    return module.table.flatten().tolist()


def test_a_buffer_in_any_layout_follows() -> None:
    assert run_ranks(_turned, 2) == [[0.0, 2.0, 4.0, 1.0, 3.0, 5.0]] * 2
