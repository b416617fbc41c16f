"""`zengine plan`: what fits, in words and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zengine.cli import main

MODEL = """
import torch
from zengine.planning.models import Shape, Transformer

def make():
    return Transformer(Shape(layers=2, width=64, vocabulary=300))

def batch(size):
    return torch.zeros(size, 16, dtype=torch.long)
"""
SMALL = [
    "plan",
    "config.json",
    "--world",
    "4",
    "--model",
    "my_planned_model:make",
    "--batch",
    "my_planned_model:batch",
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("my_planned_model.py").write_text(MODEL)
    Path("config.json").write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}')


def test_it_tells_the_peak_the_stages_and_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--memory", "100MB"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("config.json: my_planned_model:make (0.1M parameters) on 4 ranks (CPU)\n")
    assert "peak of one rank, micro-batch 4" in out
    assert "it fits" in out
    assert (
        '"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1'
        in out
    )


def test_what_does_not_fit_is_status_1_and_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--memory", "1MiB"]) == 1
    out = capsys.readouterr().out
    assert "it does not fit: " in out
    assert "no stage fits even one sample" in out


def test_programs_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--memory", "0.1 GB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["room_bytes"], data["fits"], len(data["stages"])) == (10**8, True, 4)
    assert data["own"]["peak_bytes"] < data["usable_bytes"]
    assert data["best_stage"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "lots"], '--memory "lots" is not a size; write 80GB or 24GiB'),
        (
            ["--batch", "my_planned_model:make", "--memory", "1GB"],
            '--batch "my_planned_model:make" takes no argument',
        ),
        (["--inputs", "3x", "--batch", "", "--memory", "1GB"], '--inputs "3x" is not the shape of a sample'),
        (["--batch", "", "--memory", "1GB"], "the model needs an input: pass --batch module:factory, --tokens 1024"),
        (["--batch", "", "--inputs", "7", "--memory", "1GB"], "a dry run of the model failed with"),
        (["--device", "cuda"], "there is no GPU to read the memory size of: pass --memory 80GB"),
    ],
)
def test_what_is_wrong_is_said_with_status_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 1
    assert message in capsys.readouterr().err
