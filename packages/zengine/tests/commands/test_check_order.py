"""`zengine check-order`: the ranks of a run, played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from zengine.cli import main

MODEL = """
import torch
from torch import nn
from zengine.planning.models import Shape, Transformer

def make():
    return Transformer(Shape(layers=2, width=64, vocabulary=300))

def batch(size):
    return torch.zeros(size, 16, dtype=torch.long)

class Branching(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y.square().mean() if y.sum() > 0 else y.abs().mean()

def branching():
    return Branching(8, 8)

def answers():
    return {"my_ordered_model:forward": lambda reading: reading.own().random() < 0.5}
"""
MAKE = ["--model", "my_ordered_model:make", "--batch", "my_ordered_model:batch"]
BRANCHING = ["--model", "my_ordered_model:branching", "--inputs", "8"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("my_ordered_model.py").write_text(MODEL)
    if dist.is_initialized():  # a world of one that another test has left open
        dist.destroy_process_group()
    Path("config.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 2}))


def test_a_run_of_96_ranks_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-order", "config.json", "--world", "96", *MAKE]) == 0
    out = capsys.readouterr().out
    assert " of 96 ranks played in " in out
    assert "all ranks launch the same operations in one order" in out


def test_a_decision_of_the_user_needs_an_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check-order", "config.json", "--world", "4", *BRANCHING]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "my_ordered_model.py:15 reads a value that depends on data" in error
    assert 'give an oracle for "my_ordered_model:forward". Pass --oracle' in error
    assert main([*arguments, "--oracle", "my_ordered_model:answers"]) == 0


def test_a_model_needs_an_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-order", "config.json", "--world", "4", *MAKE[:2]]) == 1
    assert "the model needs an input: pass --batch" in capsys.readouterr().err
