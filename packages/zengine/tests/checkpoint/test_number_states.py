"""Checkpoints of optimizers whose state has Python numbers and vectors of one number."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine
import zpartition
from zcomm.testing import run_ranks


class Counting(torch.optim.Optimizer):
    """Counts in every form; its rate depends on the count."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"steps": 0, "power": 1.0, "vector": torch.zeros(1), "tensor": torch.zeros(())}
                state["steps"] += 1
                state["power"] *= 0.5
                state["vector"] += 1
                state["tensor"] += 1
                param.sub_(param.grad, alpha=group["lr"] / state["steps"])


def make(stage: int) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(40, 40)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    return zengine.initialize(model=net, optimizer=Counting(net.parameters()), config=config)[0]


def train(engine: Any) -> float:
    loss = engine(torch.ones(1, 40) / 40).square().sum()
    engine.backward(loss)
    engine.step()
    return float(loss)


def _save(stage: int, folder: str) -> list[float]:
    engine = make(stage)
    for _ in range(3):
        train(engine)
    engine.save_checkpoint(folder)
    return [train(engine) for _ in range(2)]


def _load(stage: int, folder: str) -> tuple[list[float], list[Any]]:
    engine = make(stage)
    engine.load_checkpoint(folder)
    states = copy.deepcopy([dict(state) for state in engine.optimizer.state.values()])
    return [train(engine) for _ in range(2)], states


@pytest.mark.parametrize(("stage", "world", "stage_again", "world_again"), [(1, 2, 3, 1), (0, 1, 2, 2)])
def test_numbers_come_back_in_their_form(
    tmp_path: Path, stage: int, world: int, stage_again: int, world_again: int
) -> None:
    expected = run_ranks(_save, world, stage, str(tmp_path))[0]
    for losses, states in run_ranks(_load, world_again, stage_again, str(tmp_path)):
        assert losses == pytest.approx(expected)
        for state in states:
            assert (type(state["steps"]), state["steps"]) == (int, 3)
            assert (type(state["power"]), state["power"]) == (float, 0.125)
            assert state["vector"].tolist() == [3.0]
            assert (state["tensor"].shape, float(state["tensor"])) == ((), 3.0)


def _moments(folder: str) -> list[float]:
    """Save and load a model so small that rank 1 has padding only; return sums of moments, a collective."""
    found = []
    for is_loaded in (False, True):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": 1},
        }
        engine = zengine.initialize(model=nn.Linear(4, 4), config=config)[0]
        if is_loaded:
            engine.load_checkpoint(folder)
        else:
            engine.backward(engine(torch.ones(1, 4)).square().sum())
            engine.step()
            engine.save_checkpoint(folder)
        state = zpartition.safe_get_full_optimizer_state(engine.module.weight, "exp_avg")
        found.append(float(state.sum()))
    return found


def test_ranks_agree_on_what_has_state_after_a_load(tmp_path: Path) -> None:
    for before, after in run_ranks(_moments, 2, str(tmp_path)):
        assert before == after != 0
