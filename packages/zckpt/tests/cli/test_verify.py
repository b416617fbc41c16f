import json
import os
from pathlib import Path

import pytest
import torch

from zckpt import find, save, whole
from zckpt.cli import main
from zckpt.cli.output import ABSENT, CORRUPT, OK


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        shards = [whole("w", torch.rand(30, 40)), whole("v", torch.rand(50)), whole("empty", torch.ones(0))]
        save(tmp_path, f"step-{step}", shards=shards, objects={}, step=step)
    return tmp_path


def flip(path: Path, *offsets: int) -> None:
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 1
    path.write_bytes(data)


def test_a_sound_one_is_told_with_what_was_checked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(root / "step-1")]) == OK
    captured = capsys.readouterr()
    assert "step-1: sound: 3 tensors, each covered exactly once; " in captured.out
    assert captured.err == "", "no bar where nobody watches"
    assert main(["verify", str(root), "--threads", "1"]) == OK
    assert "step-2: sound" in capsys.readouterr().out


def test_every_problem_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged header does not hide the damage behind it."""
    found = find(root)
    offsets = [found.manifest.tensors[name].pieces[0].offset for name in ("w", "v")]
    flip(root / "step-2" / "rank00000.safetensors", 20, *offsets)
    assert main(["verify", str(root)]) == CORRUPT
    out = capsys.readouterr().out
    for words in ("step-2: DAMAGED: 3 problems", "header of rank00000.safetensors", "tensor 'w' in", "tensor 'v' in"):
        assert words in out
    assert main(["verify", str(root), "--limit", "1"]) == CORRUPT
    assert "... and 2 more" in capsys.readouterr().out


def test_all_of_a_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(root), "--all"]) == OK
    assert capsys.readouterr().out.count(": sound: ") == 2
    os.truncate(root / "step-1" / "rank00000.safetensors", 9)
    assert main(["verify", str(root), "--all", "--json"]) == CORRUPT
    told = json.loads(capsys.readouterr().out)
    assert told["sound"] is False
    assert [(each["tag"], len(each["problems"])) for each in told["checkpoints"]] == [("step-2", 0), ("step-1", 1)]
    assert "truncated" in told["checkpoints"][1]["problems"][0]


def test_a_file_that_vanished_while_it_was_verified(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-2" / "rank00000.safetensors").unlink()
    assert main(["verify", str(root)]) == CORRUPT
    assert "rank00000.safetensors is missing" in capsys.readouterr().err
    assert main(["verify", str(root), "--json"]) == CORRUPT
    told = json.loads(capsys.readouterr().out)
    assert (told["sound"], "is missing" in told["checkpoints"][0]["problems"][0]) == (False, True)


def test_an_unfinished_save_is_status_two(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-2" / "manifest.json").unlink()
    assert main(["verify", str(root / "step-2")]) == ABSENT
    assert "never committed" in capsys.readouterr().err


def test_files_that_other_tools_cannot_open_are_a_problem(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import safetensors

    class Other:
        def __init__(self, path: Path, framework: str) -> None:
            pass

        def __enter__(self) -> "Other":
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def keys(self) -> list[str]:
            return ["another"]

    monkeypatch.setattr(safetensors, "safe_open", Other)
    assert main(["verify", str(root)]) == CORRUPT
    assert "its header names other tensors than the manifest" in capsys.readouterr().out


def test_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    url = "memory://zckpt-verify/run"
    save(url, "a", shards=[whole("w", torch.rand(5))], objects={})
    assert main(["verify", url]) == main(["verify", url, "--all"]) == main(["verify", f"{url}/a"]) == OK
    assert capsys.readouterr().out.count("memory:/zckpt-verify/run/a: sound") == 3
