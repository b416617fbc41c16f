import json
from pathlib import Path

import pytest
import torch

from zckpt import save, whole
from zckpt.cli import main
from zckpt.cli.inspect import group_of
from zckpt.cli.output import OK


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = [
        whole("model.h.0.w", torch.rand(3, 4)),
        whole("model.h.1.w", torch.rand(3, 4)),
        whole("optimizer.exp_avg.h.0.w", torch.rand(3, 4).bfloat16()),
        whole("step", torch.tensor(1)),
    ]
    return save(tmp_path, "s", shards=shards, objects={"lr": 0.1}, rank_objects={"rng": 1}, step=1000)


def test_sizes_by_group(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder)]) == OK
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    for wanted in (
        ["tag", "s"],
        ["step", "1,000"],
        ["objects", "lr"],
        ["of", "each", "rank", "rng"],
        ["group", "tensors", "elements", "size", "dtypes"],
        ["model.h", "2", "24", "96", "B", "float32"],
        ["optimizer.exp_avg", "1", "12", "24", "B", "bfloat16"],
        ["(no", "group)", "1", "1", "8", "B", "int64"],
        ["total", "4", "37", "128", "B", "bfloat16,", "float32,", "int64"],
    ):
        assert wanted in lines
    assert "saved by      1 rank, with numpy" in out
    assert "h.0.w" not in out


def test_single_tensors_on_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(folder), "--tensors", "--match", "model.*", "--depth", "1"]) == OK
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model", "2", "24", "96", "B", "float32"] in lines
    assert ["model.h.1.w", "float32", "(3,", "4)", "48", "B", "1"] in lines
    assert not [line for line in lines if line[:1] == ["step"] and len(line) > 2]


def test_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--json"]) == OK
    told = json.loads(capsys.readouterr().out)
    assert (told["tag"], told["step"], told["world_size"], told["objects"]) == ("s", 1000, 1, {"lr": 0.1})
    assert told["tensors"]["step"] == {"dtype": "I64", "shape": [], "bytes": 8, "pieces": 1}
    assert told["groups"]["model.h"] == {"tensors": 2, "elements": 24, "bytes": 96, "dtypes": ["float32"]}


def test_groups_end_before_the_last_part_and_the_first_number() -> None:
    names = ["optimizer.exp_avg.blocks.0.w", "blocks.0.attn.w", "a.b.c.d", "w", "0.w"]
    assert [group_of(name, 2) for name in names] == [
        "optimizer.exp_avg",
        "blocks",
        "a.b",
        "(no group)",
        "(no group)",
    ]
    assert [group_of("a.b.c.d", depth) for depth in (0, 1, 9)] == ["(no group)", "a", "a.b.c"]
