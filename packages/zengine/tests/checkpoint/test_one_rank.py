"""A save that only one rank calls ends in seconds, with a message that says so; errors of saves name a path."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

import zckpt
import zcomm
from zcomm.testing import run_ranks
from zengine.testing import rank_batch, small_engine


def _saves_alone(folder: str, other: str) -> tuple[str, float]:
    engine, began_s = small_engine(), time.monotonic()
    engine.backward(engine(rank_batch(0)))
    engine.step()
    try:
        if dist.get_rank() == 0:
            engine.save_checkpoint(folder)
        elif other == "trains":
            engine.backward(engine(rank_batch(1)))
            engine.step()
        else:
            engine.load_checkpoint(folder)
    except (zcomm.CollectiveFailed, zckpt.CheckpointError) as error:
        return str(error), time.monotonic() - began_s
    return "", 0.0


def test_a_save_on_rank_0_only_says_that_all_ranks_call(tmp_path: Path) -> None:
    (saving, took_s), (training, _) = run_ranks(_saves_alone, 2, str(tmp_path), "trains")
    assert saving.startswith("Another rank did not take part in a save or load of a checkpoint")
    assert "Call save_checkpoint(), load_checkpoint()" in saving
    assert "not under `if rank == 0`" in saving
    assert "rank 1 calls all_reduce" in saving or "rank 1 all_reduce" in saving
    assert "rank 0" in training
    assert took_s < 40  # far from the time limit of a collective


@pytest.mark.parametrize("place", ["file", "file/below", "no\0name"])
def test_an_error_of_a_save_names_the_path(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    engine = small_engine()
    with pytest.raises((zckpt.CheckpointError, ValueError)) as caught:
        engine.save_checkpoint(str(tmp_path / place))
    assert str(tmp_path / "file") in str(caught.value) or "null" in str(caught.value)
    engine.close()
