import json
from pathlib import Path

import pytest
import torch

from zckpt import save, whole
from zckpt.cli import main
from zckpt.cli.output import DIFFERS, OK


@pytest.fixture
def root(tmp_path: Path) -> Path:
    a = {"same": torch.ones(8), "near": torch.zeros(4), "only_a": torch.ones(1), "cut": torch.ones(2)}
    b = {"same": torch.ones(8), "near": torch.tensor([0, 0.5, 0, 0]), "only_b": torch.ones(1), "cut": torch.ones(3)}
    for tag, tensors, lr in (("a", a, 0.1), ("b", b, 0.2)):
        shards = [whole(name, tensor) for name, tensor in tensors.items()]
        save(tmp_path, tag, shards=shards, objects={"lr": lr}, step=ord(tag))
    return tmp_path


def test_equal_ones_are_status_zero(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--read"]):
        assert main(["diff", str(root / "a"), str(root / "a"), *options]) == OK
        assert capsys.readouterr().out.splitlines()[-1] == "4 tensors equal bit for bit"


def test_each_kind_of_difference_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(root / "a"), str(root)]) == DIFFERS
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("A ")
    assert lines[2:] == [
        "1 tensor equal bit for bit",
        "1 tensor only in A:",
        "  only_a",
        "1 tensor only in B:",
        "  only_b",
        "1 tensor of another shape or dtype (A -> B):",
        "  cut: float32 (2,) -> float32 (3,)",
        "1 tensor with other values:",
        "  name  elements  different  max |A - B|",
        "  near         4          1          0.5",
        "1 difference in objects:",
        "  lr: 0.1 -> 0.2",
    ]


def test_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(root / "a"), str(root / "b"), "--json"]) == DIFFERS
    told = json.loads(capsys.readouterr().out)
    assert (told["same"], told["equal"], told["only_a"]) == (False, 1, ["only_a"])
    assert told["different"] == [{"name": "near", "elements": 4, "different": 1, "max_abs": 0.5}]


def test_a_tolerance_and_leaving_objects_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, tag in enumerate("ab"):
        save(tmp_path, tag, shards=[whole("w", torch.tensor([float(i)]))], objects={"i": i})
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["diff", *both, "--atol", "1", "--tensors-only"]) == OK
    assert main(["diff", *both, "--atol", "0.9", "--tensors-only"]) == DIFFERS
    assert main(["diff", *both, "--atol", "1"]) == DIFFERS
    capsys.readouterr()


def test_long_lists_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, tag in enumerate("ab"):
        shards = [whole(f"w{k}", torch.tensor([float(i * k)])) for k in range(5)]
        save(tmp_path, tag, shards=shards, objects={})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--limit", "2"]) == DIFFERS
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line.split()[0] for line in lines] == ["4", "name", "w4", "w3", "..."]
    assert lines[-1] == "  ... and 2 more"
