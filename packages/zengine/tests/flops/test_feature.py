"""`flops_profiler` in a run on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zengine
from zengine.config.plan.telemetry import FlopsPlan
from zengine.flops.feature import FlopsProfiling


def make(feature: FlopsProfiling, **config: Any) -> zengine.Engine:
    torch.manual_seed(0)
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
    engine, *_ = zengine.initialize(model=nn.Linear(4, 4), config=settings)
    engine.add_feature(feature)
    return engine


def train(engine: zengine.Engine, micro_steps: int) -> list[float]:
    losses = []
    for _ in range(micro_steps):
        losses.append(float(engine.backward(engine(torch.ones(2, 4)).square().mean())))
        engine.step()
    return losses


def test_one_step_is_counted_and_written_and_the_run_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    plan = FlopsPlan(enabled=True, profile_step=1, output_file=str(path))
    engine = make(FlopsProfiling(plan, tmp_path / "run"))
    losses = train(engine, 1)
    assert not path.exists()
    losses += train(engine, 2)
    found = json.loads((tmp_path / "run" / "flops.json").read_text())
    assert found["step"] == 1
    assert found["modules"][0]["flops"] == 2 * 2 * 4 * 4
    assert found["backward_flops"] == 2 * 2 * 4 * 4  # for the weight alone
    assert "Linear after step 1" in path.read_text()
    assert losses == train(make(FlopsProfiling(FlopsPlan(profile_step=99), None)), 3)


def test_a_disk_that_fails_is_told_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    plan = FlopsPlan(enabled=True, profile_step=0, output_file=str(tmp_path / "run" / "table.txt"))
    train(make(FlopsProfiling(plan, tmp_path / "run")), 2)
    told = [message for message in caplog.messages if "training goes on" in message]
    assert [message.split(" in ")[0] for message in told] == ["the table of FLOPs", "flops.json"]


def test_while_gradients_accumulate_one_micro_step_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make(FlopsProfiling(FlopsPlan(profile_step=0), None), gradient_accumulation_steps=3)
    train(engine, 2)
    assert "64 FLOPs = 32 MACs" in capsys.readouterr().out
    train(engine, 4)
    assert capsys.readouterr().out == ""


def test_a_forward_without_a_backward_is_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make(FlopsProfiling(FlopsPlan(profile_step=0), None))
    with torch.no_grad():
        engine(torch.ones(2, 4))
    engine(torch.ones(2, 4))
    with pytest.raises(RuntimeError):
        engine(torch.ones(2, 3))
    train(engine, 1)
    assert "64 FLOPs = 32 MACs" in capsys.readouterr().out
    assert not engine.module._forward_hooks


def test_another_rank_than_the_first_measures_nothing() -> None:
    feature = FlopsProfiling(FlopsPlan(profile_step=0), None)
    module = nn.Linear(2, 2)
    parts = SimpleNamespace(world=SimpleNamespace(rank=1), partition=SimpleNamespace(shapes=dict))
    feature.attach(SimpleNamespace(parts=parts, module=module, clock=SimpleNamespace(steps=5)))
    feature.forward_begin((), {})
    assert not module._forward_hooks
