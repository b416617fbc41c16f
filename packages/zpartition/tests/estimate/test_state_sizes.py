"""Sizes of optimizer states, measured on samples: elementwise optimizers and those that look at shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zpartition
from zpartition import ZeroPolicy
from zpartition.estimate.state_sizes import StateSizes
from zpartition.layout.layout import ParamSpec, plan_layout

SHAPES = {"matrix": (300, 200), "vector": (70,), "kernel": (8, 4, 3, 3)}


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "Adafactor", "Muon"])
def test_whole_parameters_have_what_torch_keeps_of_them(kind: str) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if kind != "Muon" or len(shape) == 2}
    specs = [ParamSpec(name, shape, torch.float32) for name, shape in shapes.items()]
    (bucket,) = plan_layout(specs, world_size=1, num_shards=1).buckets
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes.values()]
    optimizer = getattr(torch.optim, kind)(params, lr=1e-3)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    entries: list[Any] = [
        value for state in optimizer.state.values() for key, value in state.items() if key != "step"
    ]
    expected = sum(value.nbytes for value in entries if isinstance(value, torch.Tensor))
    found = StateSizes(ZeroPolicy(), lambda p: getattr(torch.optim, kind)(p, lr=1e-3)).of(bucket)
    padding = 8 * (bucket.numel - sum(slot.numel for slot in bucket.slots))
    assert expected <= found <= expected + (padding if kind in ("AdamW", "Adagrad") else 0)


class Rows(torch.optim.Optimizer):
    """Keeps a number for each row of a matrix; it takes cuts."""

    elementwise = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def place_on_ranks(self, segments: Any, ranks: Any) -> None: ...

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param] = {"rows": torch.zeros(param.shape[:1])} if param.dim() == 2 else {"all": param.clone()}


def test_whoever_has_a_part_of_a_matrix_has_its_rows_whole() -> None:
    specs = [ParamSpec("matrix", (300, 200), torch.float32), ParamSpec("vector", (2000,), torch.float32)]
    (bucket,) = plan_layout(specs, world_size=4, num_shards=4).buckets
    most = max(sum(300 if len(p.slot.shape) == 2 else p.numel for p in bucket.pieces(rank)) for rank in range(4))
    assert StateSizes(ZeroPolicy(stage=2), Rows).of(bucket) == 4 * most


def test_a_plan_sorts_parameters_as_the_optimizer_does() -> None:
    module = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [p for p in params if p.dim() == 2]}, {"params": [p for p in params if p.dim() < 2]}]
        return torch.optim.SGD([group for group in groups if group["params"]], momentum=0.9)

    partition = zpartition.shard(module, make(list(module.parameters())), policy=ZeroPolicy(stage=1))
    planned = zpartition.plan(nn.Sequential(*module), policy=ZeroPolicy(stage=1), world_size=1, optimizer=make)
    assert planned.states == 4 * sum(bucket.span_numel for bucket in partition.layout.buckets)
    assert len(partition.layout.buckets) == 2
    partition.close()
