"""Gradual unfreezing with an engine, and its checkpoints."""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.head = nn.Linear(40, 40), nn.Linear(40, 40)
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))).square().mean()


def engine_of(kind: str, stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": kind, "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 10,
            "reduce_at": "micro_step",  # as stage 3 does
        },
    }
    return zengine.initialize(model=Net(), config=config)[0]


def steps(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        for micro in range(2):
            data = torch.randn(2, 40, generator=torch.Generator().manual_seed(100 * step + micro))
            loss = engine(data * (1 + zcomm.group_rank()))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def goes_on(directory: str) -> None:
    curves = []
    for kind, stage in (("AdamW", 1), ("AdamW", 3), ("LAMB", 3)):
        engine = engine_of(kind, stage)
        steps(engine, 0, 2)
        engine.module.body.requires_grad_(True)
        steps(engine, 2, 4)
        engine.save_checkpoint(directory, f"{kind}-{stage}")
        expected = steps(engine, 4, 6)
        engine.close()
        again = engine_of(kind, 3)
        again.module.body.requires_grad_(True)
        again.load_checkpoint(directory, f"{kind}-{stage}")
        assert steps(again, 4, 6) == expected, (kind, stage)
        again.close()
        curves.append(expected)
    assert curves[0] == curves[1] != curves[2]


def test_a_run_and_its_continuation_are_the_same_on_two_ranks() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(goes_on, 2, directory)


def test_in_the_middle_of_a_step_it_is_refused_and_the_step_may_go_on() -> None:
    engine = engine_of("AdamW", 3)
    data = torch.ones(2, 40)
    engine.backward(engine(data))
    engine.step()
    engine.module.body.requires_grad_(True)
    with pytest.raises(ValueError, match=r"parameter body.weight was unfrozen in the middle of a step"):
        engine(data)
    engine.module.body.requires_grad_(False)
    engine.backward(engine(data))
    assert engine.step() is not None
    engine.close()


def test_state_that_is_not_taken_is_told(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of("AdamW", 0)
    engine.module.body.requires_grad_(True)
    steps(engine, 0, 1)
    engine.save_checkpoint(str(tmp_path))
    engine.close()
    other = engine_of("AdamW", 0)
    with caplog.at_level(logging.WARNING):
        other.load_checkpoint(str(tmp_path))
    assert "optimizer state of body.bias (2 parameters in all), which this engine does not train" in caplog.text
    other.close()


def only_one_rank_unfreezes() -> tuple[str, list[float]]:
    engine, is_one = engine_of("AdamW", 1), zcomm.group_rank() == 1
    steps(engine, 0, 1)
    engine.module.body.requires_grad_(is_one)
    with pytest.raises(ValueError, match="ranks have unfrozen different parameters") as caught:
        steps(engine, 1, 2)
    engine.module.body.requires_grad_(False)
    losses = steps(engine, 1, 3)
    engine.close()
    return str(caught.value), losses


def test_one_rank_that_unfreezes_alone_is_told_with_the_others_and_training_may_go_on() -> None:
    (first, _), (second, _) = run_ranks(only_one_rank_unfreezes, 2)
    assert "rank 0: none" in first
    assert "rank 1: body.weight, body.bias (2 in all)" in second
