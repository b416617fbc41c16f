"""Disk step: committed on all ranks or undone on all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from zcomm.testing import run_ranks
from zpartition import Offload, Tier
from zpartition.disk.files import BlockFile
from zpartition.disk.folder import Folder
from zpartition.testing import backward, differing, fingerprint, make, train


def _step_that_fails(offload: Offload, where: str) -> tuple[str, list[str], list[str]]:
    """What rank 1's trouble says on this rank; what it has changed; what a later step gives that it should not."""
    model, optimizer, partition = make(offload, 2, torch.bfloat16)
    train(partition, model, optimizer, range(2), 1)
    before = fingerprint(partition, model)
    backward(partition, model, 2, 1)
    partition.finish_gradients()
    with pytest.MonkeyPatch.context() as patch:
        if zcomm.group_rank() == 1:
            _break(patch, where, optimizer)
        with pytest.raises(Exception, match=r".+") as caught:
            partition.apply(optimizer.step)
    partition.zero_grad()
    changed = differing(before, fingerprint(partition, model))
    train(partition, model, optimizer, range(2, 4), 1)
    later = fingerprint(partition, model)
    partition.close()

    model, optimizer, partition = make(Offload(), 2, torch.bfloat16)
    train(partition, model, optimizer, range(4), 1)
    wrong = differing(fingerprint(partition, model), later)
    partition.close()
    return f"{type(caught.value).__name__}: {caught.value}", changed, wrong


def _break(patch: pytest.MonkeyPatch, where: str, optimizer: Any) -> None:
    calls = []

    def full(self: Any, *args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def stops(*args: Any, step: Any = optimizer.step) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("in the second group")
        step()

    def damaged(self: BlockFile, memory: Any, offset: int, read: Any = BlockFile.read) -> int:
        came: int = read(self, memory, offset)
        memory.bytes[0] ^= 1
        return came

    if where == "write":
        patch.setattr(BlockFile, "write", full)
    elif where == "journal":
        patch.setattr(Folder, "write_next", full)
    elif where == "read":
        patch.setattr(BlockFile, "read", damaged)
    else:
        patch.setattr(optimizer, "step", stops)


@pytest.mark.parametrize(
    ("where", "errors"),
    [("write", "DiskFull"), ("journal", "DiskFull"), ("read", "DiskCorrupt"), ("step", "ArithmeticError")],
)
def test_trouble_of_one_rank_leaves_all_of_them_where_they_were(where: str, errors: str, tmp_path: Path) -> None:
    results = run_ranks(_step_that_fails, 2, Offload(states=Tier.DISK, directory=str(tmp_path), ratio=0.8), where)
    for message, changed, wrong in results:
        assert not changed
        assert not wrong
        assert errors in message
    assert results[1][0].startswith(errors)
    assert results[0][0].startswith("RuntimeError: rank 1 could not update its states on disk, so all ranks keep")


def test_a_step_that_is_interrupted_is_undone_weights_and_all(tmp_path: Path) -> None:
    model, optimizer, partition = make(Offload(states=Tier.DISK, directory=str(tmp_path)), 0, torch.bfloat16)
    train(partition, model, optimizer, range(1), 1)
    before = fingerprint(partition, model)
    backward(partition, model, 2, 1)
    partition.finish_gradients()
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        optimizer.step()

    with pytest.raises(KeyboardInterrupt):
        partition.apply(step)
    partition.zero_grad()
    assert not differing(before, fingerprint(partition, model))
    partition.close()


def _skipped(offload: Offload) -> tuple[int, int]:
    model, optimizer, partition = make(offload, 1, torch.float32)
    train(partition, model, optimizer, range(1), 1)
    (disk,) = partition.offload_manager.disks
    before = disk.store.generation
    backward(partition, model, 1, 1)
    partition.finish_gradients()
    partition.zero_grad()
    after = disk.store.generation
    partition.close()
    return before, after


def test_a_step_that_is_left_out_writes_nothing(tmp_path: Path) -> None:
    for before, after in run_ranks(_skipped, 1, Offload(states=Tier.DISK, directory=str(tmp_path))):
        assert before == after > 0
