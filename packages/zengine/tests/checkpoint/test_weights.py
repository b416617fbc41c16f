"""Weights from files: a flipped byte raises on every rank before weights change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zckpt
import zckpt.interchange
import zcomm
import zengine
import zpartition
from zcomm.testing import run_ranks
from zengine.engine.clock import HalfLoaded


def engine_at(stage: int) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zengine.initialize(model=nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 1)), config=config)[0]


def values() -> dict[str, Tensor]:
    return {name: torch.full_like(value, 2.0) for name, value in engine_at(0).state_dict().items()}


def flip_where(file: Path, pattern: bytes) -> None:
    """One bit, in the middle of what is stored as `pattern`."""
    content = bytearray(file.read_bytes())
    content[content.index(pattern) + len(pattern) // 2] ^= 1
    file.write_bytes(content)


def write_folder(folder: Path) -> Path:
    """Two `.bin` files and their index; the second is damaged."""
    folder.mkdir()
    table = {}
    for number, (name, value) in enumerate(values().items()):
        file = f"pytorch_model-{number}.bin"
        torch.save({name: value}, folder / file)
        table[name] = file
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    flip_where(folder / file, torch.full((1,), 2.0).numpy().tobytes())
    return folder


def write_file(path: Path) -> Path:
    torch.save(values(), path)
    flip_where(path, torch.full((40,), 2.0).numpy().tobytes())
    return path


def taken(path: str, stage: int) -> list[str]:
    """What an engine says of damaged weights, and whether it is as before."""
    engine = engine_at(stage)
    before = engine.state_dict()
    with pytest.raises(zckpt.CheckpointCorrupt, match=r"member 'data/.': its checksum differs") as told:
        engine.load_weights(path)
    assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
    engine.close()
    return [str(told.value)]


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 3)])
@pytest.mark.parametrize("write", [write_file, write_folder])
def test_a_flipped_byte_is_told_before_anything_is_taken(
    tmp_path: Path, write: Any, world_size: int, stage: int
) -> None:
    path = write(tmp_path / "x.pt")
    for (message,) in run_ranks(taken, world_size, str(path), stage):
        assert str(path) in message


def test_other_readers_of_weights_tell_it_too(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.bin")
    with pytest.raises(zckpt.CheckpointCorrupt, match="its checksum differs"):
        zckpt.interchange.read_weights(path)
    with pytest.raises(zckpt.CheckpointCorrupt, match="its checksum differs"):
        zckpt.interchange.import_weights(path, tmp_path / "root")


def cannot_be_read(path: str) -> str:
    """A rank alone has no file: all are told, by one class."""
    engine = engine_at(1)
    with pytest.raises(zckpt.CheckpointNotFound) as told:
        engine.load_weights(path if zcomm.group_rank() == 0 else f"{path}.absent")
    return str(told.value)


def test_a_rank_that_finds_no_file_is_every_ranks_error(tmp_path: Path) -> None:
    torch.save(values(), tmp_path / "x.pt")
    first, second = run_ranks(cannot_be_read, 2, str(tmp_path / "x.pt"))
    assert first.startswith("nothing was loaded, because of rank 1: ")
    assert "absent does not exist" in second


def fails_half_way(path: str) -> list[str]:
    """The first rank cannot read what it has opened; nobody waits for it, and nobody goes on."""
    engine, read, seen = engine_at(1), zpartition.tensors.loading._read, []

    def failing(shard: Any, source: Any) -> None:
        seen.append(1)
        if zcomm.group_rank() == 0 and len(seen) > 1:
            raise OSError("Input/output error")
        read(shard, source)

    with mock.patch.object(zpartition.tensors.loading, "_read", failing), pytest.raises((OSError, ValueError)):
        engine.load_weights(path)
    with pytest.raises(HalfLoaded, match=rf"forward\(\) is not possible: the load of weights from {path} failed"):
        engine(torch.ones(2, 3))
    engine.load_weights(path)
    assert all(value.eq(2.0).all() for value in engine.state_dict().values())
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
    return []


def test_a_file_that_fails_half_way_stops_the_engine_until_weights_are_whole(tmp_path: Path) -> None:
    torch.save(values(), tmp_path / "x.pt")
    run_ranks(fails_half_way, 2, str(tmp_path / "x.pt"))


def test_a_state_dict_that_fits_in_part_stops_the_engine_until_one_fits() -> None:
    """torch copies what fits, and raises then."""
    engine = engine_at(0)
    wrong = {**engine.state_dict(), "1.weight": torch.ones(2, 2)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        engine.load_state_dict(wrong)
    with pytest.raises(HalfLoaded, match=r"engine\.load_state_dict\(\) failed"):
        engine(torch.ones(2, 3))
    engine.load_state_dict(values())
    engine(torch.ones(2, 3))
