"""The memory plan predicts the optimizer state of each optimizer to the byte."""

from __future__ import annotations

import functools

import torch
from torch import nn

import zengine
import zoptim
import zpartition
from zcomm.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


def planned_and_held() -> list[tuple[str, int, int]]:
    found = []
    for kind, stage in (("Muon", 1), ("Adafactor", 1), ("Muon", 3), ("Adafactor", 3), ("LAMB", 0), ("Lion", 2)):
        optimizer = {"type": kind, "params": {"lr": 0.01}}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": stage != 0},
            "optimizer": optimizer,
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = zengine.initialize(model=Net(), config=config)
        dtype = next(engine.module.parameters()).dtype
        planned = zpartition.plan(
            Net().to(dtype),
            policy=engine.plan.zero,
            world_size=2,
            optimizer=functools.partial(zoptim.make_optimizer, kind, options={"lr": 0.01}),
        )
        engine.backward(engine(torch.ones(2, 256, dtype=dtype)))
        engine.step()
        found.append((f"{kind} at stage {stage}", planned.states, engine.parts.partition.ledger()["states"]))
        engine.close()
    return found


def test_states_of_shards_are_as_planned() -> None:
    for by_rank in zip(*run_ranks(planned_and_held, 2)):
        name, planned, _ = by_rank[0]
        assert planned == max(held for _, _, held in by_rank) > 0, name
