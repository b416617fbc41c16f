"""`zengine check`: problems and notices of a config."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zengine.cli import main

GOOD = '{"train_batch_size": 64,\n "train_micro_batch_size_per_gpu": 4,\n "vocabulary_size": 8}'


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.json").write_text(GOOD)
    (tmp_path / "typo.json").write_text('{"gradient_cliping": 1.0}')
    (tmp_path / "both.json").write_text('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}')


def test_it_needs_no_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "good.json"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("good.json: no problems (pass --world to check batch sizes too)\n")
    assert "good.json:3: vocabulary_size has no effect here" in out


def test_with_a_world_it_resolves_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "good.json", "--world", "4"]) == 0
    assert capsys.readouterr().out.startswith("good.json: no problems at world size 4\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["typo.json"], 'typo.json:1:2  gradient_cliping = 1.0: unknown key. Did you mean "gradient_clipping"?'),
        (["both.json"], "are both on. Keep one of them."),
        (["good.json", "--world-size", "3"], "Nearest valid train_batch_size: 60 or 72."),
        (["none.json"], "none.json: no such file (working directory: "),
    ],
)
def test_problems_are_printed_with_status_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


CONFIG = """{"train_batch_size": 64, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3},
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
 "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}},
 "checkpoint": {"keep": {"last": 2, "best": ["loss"]}}%s}"""


def test_neither_checks_nor_help_import_torch(tmp_path: Path) -> None:
    (tmp_path / "full.json").write_text(CONFIG % "")
    (tmp_path / "wrong.json").write_text(CONFIG % ', "weight_decay": 1, "fp16": {"enabled": true}')
    script = """
import sys
from zengine.cli import main
for line in ("check full.json", "check wrong.json", "schema", "convert-config full.json", "-h"):
    try:
        print("status", main(line.split()))
    except SystemExit:
        pass
heavy = {"torch", "zcomm", "zpartition", "zprecision", "zoptim.optimizers.flat"} & set(sys.modules)
print("heavy", heavy)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("status")] == ["status 0", "status 1", "status 0", "status 0"]
    assert lines[-1] == "heavy set()"
    assert '"weight_decay" belongs under "optimizer.params"' in done.stderr
