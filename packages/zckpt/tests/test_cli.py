import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

from zckpt import save, whole
from zckpt.cli import ABSENT, CORRUPT, OK, main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        shards = [whole("w", torch.rand(3, 4)), whole("s", torch.tensor(1))]
        save(tmp_path, f"step-{step}", shards=shards, objects={"scheduler": {}}, rank_objects={"rng": 1}, step=step)
    return tmp_path


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_lists_newest_first_and_what_crashes_left(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".tmp-step-3-0123456789abcdef").mkdir()
    (root / "empty").mkdir()
    assert main(["ls", str(root)]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step-2 ")
    assert lines[0].endswith("2 tensors  1 ranks  <- latest")
    assert lines[1].startswith("step-1 ")
    assert "incomplete: no manifest.json" in lines[2]
    assert "left by an interrupted save" in lines[3]


def test_ls_tells_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(root / "step-1" / "rank00000.safetensors", 3)
    flip_last_byte(root / "step-2" / "manifest.json")
    assert main(["ls", str(root)]) == CORRUPT
    assert capsys.readouterr().out.count("DAMAGED") == 2


def test_show_tells_what_is_in_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(root / "step-1")]) == OK
    out = capsys.readouterr().out
    for words in ("tag step-1, step 1", "w: float32 (3, 4), 1 pieces", "s: int64 ()", "objects: scheduler", "rng"):
        assert words in out


def test_verify_is_silent_about_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(root / "step-1")]) == OK
    assert "sound" in capsys.readouterr().out
    assert main(["verify", str(root)]) == OK
    assert "step-2: sound" in capsys.readouterr().out
    flip_last_byte(root / "step-2" / "rank00000.safetensors")
    assert main(["verify", str(root)]) == CORRUPT
    assert "tensor 'w' in rank00000.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_nothing_there_is_status_two(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty"):
        assert main([command, str(tmp_path / name)]) == ABSENT
    capsys.readouterr()


def test_an_unfinished_save_is_status_two(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-2" / "manifest.json").unlink()
    assert main(["verify", str(root / "step-2")]) == ABSENT
    assert "never committed" in capsys.readouterr().err


def test_one_that_was_moved_aside_can_be_looked_at(root: Path) -> None:
    (root / "step-2").rename(root / ".old-step-2-0123456789abcdef")
    assert main(["verify", str(root / ".old-step-2-0123456789abcdef")]) == OK
    assert main(["ls", str(root)]) == OK


def test_it_runs_as_a_module(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in ((["verify", str(root)], OK), ([], ABSENT)):
        monkeypatch.setattr(sys, "argv", ["zckpt", *arguments])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_module("zckpt", run_name="__main__")
        assert stopped.value.code == status
    out, err = capsys.readouterr()
    assert ("sound" in out, "usage: zckpt" in err) == (True, True)
