import json
from pathlib import Path

import pytest
import torch

from zckpt import list_checkpoints, save, whole
from zckpt.cli import main
from zckpt.cli.output import CORRUPT, OK, USAGE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        objects = {"metrics": {"loss": float(step)}}
        save(tmp_path, f"s{step}", shards=[whole("w", torch.ones(2))], objects=objects, step=step)
    return tmp_path


def tags(root: Path) -> list[str]:
    return [each.tag for each in list_checkpoints(root)]


def test_a_dry_run_tells_and_the_real_one_does(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["prune", str(root), "--last", "1", "--best", "loss"]
    assert main([*arguments, "--dry-run"]) == OK
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["tag", "step", "because"],
        ["s3", "3", "kept", "`latest`", "names", "it"],
        ["s2", "2", "would", "be", "removed"],
        ["s1", "1", "kept", "min", "loss"],
        ["1", "checkpoint", "would", "be", "removed,", "2", "kept"],
    ]
    assert tags(root) == ["s3", "s2", "s1"]
    assert main(arguments) == OK
    assert "s2      2  removed" in capsys.readouterr().out
    assert tags(root) == ["s3", "s1"]


def test_as_json_and_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "s1" / "rank00000.safetensors").unlink()
    assert main(["prune", str(root), "--last", "1", "--keep-tag", "z*", "--every", "5", "--json"]) == CORRUPT
    told = json.loads(capsys.readouterr().out)
    assert (told["removed"], told["kept"]) == (["s2"], {"s3": "`latest` names it"})
    assert "is missing" in told["damaged"][0]
    assert (root / "s1").is_dir()


def test_a_root_that_is_not_there_is_status_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for root in ("memory://zckpt-prune-cli/mistyped", str(tmp_path)):
        assert main(["prune", root, "--last", "1"]) == USAGE
        assert "holds no committed checkpoint" in capsys.readouterr().err


def test_a_policy_that_makes_no_sense_is_status_two(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for best, words in (
        ("loss:low", "mode must be 'min' or 'max', given 'low'"),
        ("loss:max:x", "'x' is not a number"),
    ):
        assert main(["prune", str(root), "--last", "1", "--best", best]) == USAGE
        assert words in capsys.readouterr().err
