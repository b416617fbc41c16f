"""`zengine convert-config`: the new config on standard output, what changed on standard error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zengine.cli import main

OLD = {"train_batch_size": 8, "bfloat16": {"enabled": True}, "vocabulary_size": 8}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.json").write_text(json.dumps(OLD))
    Path("refused.json").write_text(json.dumps({**OLD, "injection_policy": {}}))
    Path("auto.json").write_text('{"train_batch_size": "auto", "gradient_clipping": "auto"}')


def test_it_prints_json_and_tells_the_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-config", "old.json", "--from", "deepspeed-0.18"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "config_version": "deepspeed-0.18",
        "train_batch_size": 8,
        "bf16": {"enabled": True},
    }
    assert captured.err.splitlines() == [
        "bfloat16 is now bf16",
        "vocabulary_size is left out: it only asks for advice on padding",
    ]


def test_it_writes_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-config", "old.json", "--out", "new.json"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["convert-config", "new.json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "no changes\n"
    assert captured.out == Path("new.json").read_text()


def test_what_is_refused_is_said_and_dropped_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-config", "refused.json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "refused.json:1:78  injection_policy" in captured.err
    assert main(["convert-config", "refused.json", "--drop-rejected"]) == 0
    captured = capsys.readouterr()
    assert "injection_policy" not in captured.out
    assert "injection_policy is dropped: it is rejected here" in captured.err


def test_open_values_stay_open_unless_they_are_to_be_filled_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-config", "auto.json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"train_batch_size": "auto", "gradient_clipping": "auto"}
    assert main(["convert-config", "auto.json", "--fill-auto", "--auto", "train_batch_size=16"]) == 0
    assert json.loads(capsys.readouterr().out) == {"train_batch_size": 16, "gradient_clipping": 1.0}


def test_a_place_that_cannot_be_written_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-config", "old.json", "--out", "no/such/place.json"]) == 1
    assert "--out no/such/place.json: No such file or directory" in capsys.readouterr().err
