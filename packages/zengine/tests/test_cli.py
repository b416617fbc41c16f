"""The two commands on configs, as a person types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zengine.cli import main

GOOD = '{"train_batch_size": 64,\n "train_micro_batch_size_per_gpu": 4,\n "vocabulary_size": 8}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.json").write_text(GOOD)
    (tmp_path / "typo.json").write_text('{"gradient_cliping": 1.0}')
    (tmp_path / "both.json").write_text('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}')
    (tmp_path / "auto.json").write_text('{"train_batch_size": 8, "bf16": {"enabled": "auto"}}')
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_check_needs_no_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "good.json"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("good.json: no problems (give --world-size to check the batch sizes too)\n")
    assert "good.json:3: vocabulary_size has no effect here" in out


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["check", "typo.json"],
            'typo.json:1:2  gradient_cliping = 1.0: unknown key. Did you mean "gradient_clipping"?',
        ),
        (["check", "both.json"], "are both on. Keep one of them."),
        (["check", "good.json", "--world-size", "3"], "Nearest valid train_batch_size: 60 or 72."),
        (["explain", "good.json", "--world-size", "3"], "Nearest valid train_batch_size: 60 or 72."),
        (["check", "none.json"], "none.json: no such file (working directory: "),
    ],
)
def test_problems_are_printed_with_exit_code_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.usefixtures("folder")
def test_check_with_a_world_size_resolves_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "good.json", "--world-size", "4"]) == 0
    assert capsys.readouterr().out.startswith("good.json: no problems at world size 4\n")


@pytest.mark.usefixtures("folder")
def test_explain_prints_every_value_with_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "good.json", "--world-size", "4"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["train_batch_size", "64", "good.json:1"] in rows
    assert ["gradient_accumulation_steps", "4", "derived"] in rows


@pytest.mark.usefixtures("folder")
def test_auto_bf16_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zprecision.measure_bf16_speedup", lambda device: 1.5)
    assert main(["explain", "auto.json", "--world-size", "1"]) == 0
    assert ["bf16.enabled", "true", "auto"] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("arguments", [[], ["explain", "x.json"], ["check", "x.json", "--world-size", "0"]])
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m zengine" in capsys.readouterr().err


def test_the_module_runs(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zengine", "check", "good.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
