import json
import os
from pathlib import Path

import pytest
import torch

from zckpt import save, whole
from zckpt.cli import main
from zckpt.cli.output import ABSENT, CORRUPT, OK

URL = "memory://zckpt-listing/run"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path, f"step-{step}", shards=[whole("w", torch.rand(3, 4))], objects={}, step=step)
    return tmp_path


def test_newest_first_and_what_crashes_left(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".tmp-step-3-0123456789abcdef").mkdir()
    (root / "empty").mkdir()
    (root / "notes.txt").write_text("x")
    assert main(["ls", str(root)]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["tag", "step", "size", "tensors", "saved", "by"]
    assert lines[1].startswith("step-2     2 ")
    assert lines[1].endswith("1  1 rank  <- latest")
    assert lines[2].startswith("step-1 ")
    assert lines[3] == "empty  incomplete: no manifest.json"
    assert lines[4].startswith(".tmp-step-3-0123456789abcdef  left by an interrupted save")
    assert len(lines) == 5


def test_damage_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(root / "step-1" / "rank00000.safetensors", 3)
    data = bytearray((root / "step-2" / "manifest.json").read_bytes())
    data[-5] ^= 1
    (root / "step-2" / "manifest.json").write_bytes(data)
    assert main(["ls", str(root)]) == CORRUPT
    out = capsys.readouterr().out
    assert out.count("DAMAGED") == 2
    assert "truncated" in out


def test_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--json", str(root)]) == OK
    told = json.loads(capsys.readouterr().out)
    assert [(row["tag"], row["state"], row["latest"]) for row in told["checkpoints"]] == [
        ("step-2", "complete", True),
        ("step-1", "complete", False),
    ]
    assert told["interrupted"] == []


def test_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", URL + "-none"]) == ABSENT
    save(URL, "a", shards=[], objects={}, step=7)
    assert main(["ls", URL]) == OK
    assert "a       7  " in capsys.readouterr().out
