"""Tiles and losses without logits under every ZeRO stage: one step gives the weights of a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.sequence import chunked_cross_entropy, tiled, tiled_loss

WIDTH, VOCABULARY = 8, 19


class Model(nn.Module):
    """Two MLPs and a head; the loss in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.way = way

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = x + (mlp(x) if self.way == "plain" else torch.cat(tiled(mlp, [x], 3), 1))
        flat = x.flatten(0, 1), labels.flatten()
        if self.way == "chunked":
            return self._chunked(*flat)
        return self._loss(*flat) if self.way == "plain" else tiled_loss(self._loss, flat, 4)

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.head(hidden), labels, reduction="sum")

    def _chunked(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return chunked_cross_entropy(
            hidden, self.head.weight, labels, bias=self.head.bias, tile_tokens=3, reduction="sum"
        )


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, 5, WIDTH, generator=generator), torch.randint(0, VOCABULARY, (2, 5), generator=generator))
        for _ in range(4)
    ]


def plain() -> list[Tensor]:
    """Two micro-steps of two ranks, in one process."""
    model = Model("plain")
    for x, labels in data():
        (model(x, labels) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    return [param.detach() for param in model.parameters()]


def _worst(way: str) -> list[float]:
    expected, found = plain(), []
    for stage in range(4):
        model = Model(way)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        policy = ZeroPolicy(stage=stage, unit_numel=300, persist_numel=0, max_live_numel=0)
        partition = zpartition.shard(model, optimizer, policy=policy)
        mine = data()[zcomm.group_rank() :: 2]
        for index, (x, labels) in enumerate(mine):
            with partition.micro_step(is_last=index == 1):
                model(x, labels).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
        with zpartition.gathered(model):
            found.append(max(float((a - b).abs().max()) for a, b in zip(model.parameters(), expected)))
        partition.close()
    return found


@pytest.mark.parametrize("way", ["chunked", "tiled loss"])
def test_one_step_equals_a_plain_loop(way: Any) -> None:
    for found in run_ranks(_worst, 2, way):
        assert max(found) < 1e-5, found
