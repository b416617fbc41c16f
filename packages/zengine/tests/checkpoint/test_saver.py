"""Background saves: the same files, errors on all ranks together, no thread left."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zckpt
import zcomm
import zengine
from zcomm.testing import run_ranks


def engine_of(**checkpoint: Any) -> Any:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "checkpoint": checkpoint,
    }
    return zengine.initialize(model=model, config=config)[0]


def steps(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        data = torch.randn(2, 30, generator=torch.Generator().manual_seed(10 * step + zcomm.group_rank()))
        loss = engine(data).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def saves_behind(directory: str) -> None:
    engine = engine_of(async_save=True, keep={"last": 2})
    for step in range(3):
        steps(engine, step, step + 1)
        folder = engine.save_checkpoint(directory, f"step{step}")
        assert folder == str(Path(directory, f"step{step}"))
    expected = steps(engine, 3, 6)
    engine.load_checkpoint(directory)  # waits for what is under way
    assert steps(engine, 3, 6) == expected
    engine.wait_for_checkpoint()
    engine.save_checkpoint(directory, "last")
    engine.close()
    zcomm.barrier()
    assert sorted(seen.tag for seen in zckpt.list_checkpoints(directory)) == ["last", "step2"]
    zckpt.find(directory).verify()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("zckpt")]
    other = engine_of()
    other.load_checkpoint(directory, "step2")
    assert steps(other, 3, 6) == expected
    other.close()


def test_what_is_saved_behind_is_what_would_have_been_saved() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(saves_behind, 2, directory)


def fails_behind(directory: str) -> list[str]:
    engine = engine_of(async_save=True)
    steps(engine, 0, 1)
    engine.save_checkpoint(directory, "first")
    engine.wait_for_checkpoint()
    Path(directory, "a file").touch()
    told = []
    engine.save_checkpoint(str(Path(directory, "a file")), "second")
    for step in range(1, 400):
        try:
            steps(engine, step, step + 1)
        except zckpt.CheckpointError as error:
            told.append(f"{step}: {error}")
            break
    steps(engine, 400, 401)  # told once, and training goes on
    engine.save_checkpoint(str(Path(directory, "a file")), "third")
    with pytest.raises(zckpt.CheckpointError):
        engine.close()
    zckpt.find(directory, "first").verify()
    return told


def test_what_went_wrong_is_told_on_all_ranks_at_the_same_step() -> None:
    with tempfile.TemporaryDirectory() as directory:
        first, second = run_ranks(fails_behind, 2, directory)
    assert len(first) == 1
    assert "a file" in first[0]
    assert first[0].split(":")[0] == second[0].split(":")[0]
