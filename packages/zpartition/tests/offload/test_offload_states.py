"""Offloaded states free the device, are reloaded bit for bit, and raise in between."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import Offload, OffloadStateType, Tier
from zpartition.disk import DiskCorrupt, DiskFailed
from zpartition.disk.files import BlockFile
from zpartition.testing import backward, differing, fingerprint, make, train


def _away_and_back(offload: Offload, stage: int, dtype: torch.dtype, directory: str) -> list[str]:
    model, optimizer, partition = make(offload, stage, dtype)
    train(partition, model, optimizer, range(2), 1)
    before, held = fingerprint(partition, model), partition.ledger()
    state, whole = optimizer.state_dict(), model.state_dict()
    partition.offload_states(directory=directory)
    for owner in ("parameters", "masters", "accumulators", "states", "buckets"):
        assert partition.ledger()[owner] == 0, owner
    if directory:
        assert not partition.ledger().get("host states")
    for use in (
        lambda: model(torch.ones(1, 24, dtype=dtype), True),
        lambda: model.middle[0](torch.ones(1, 48, dtype=dtype)),
        lambda: partition.apply(optimizer.step),
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(state),
        model.state_dict,
        model.first.state_dict,
        lambda: model.load_state_dict(whole),
        lambda: zpartition.gathered(model.first).__enter__(),
        partition.synchronise,
        lambda: zpartition.safe_get_full_fp32_param(model.last.bias),
        lambda: list(partition.shards()),
        partition.offload_states,
    ):
        with pytest.raises(RuntimeError, match=r"reload_states\(\) on every rank first"):
            use()
    partition.reload_states()
    partition.reload_states()
    wrong = differing(before, fingerprint(partition, model))
    train(partition, model, optimizer, range(2, 4), 1)
    now = partition.ledger()  # buffers are made anew, and fewer at once than in the very first step
    assert {owner: now[owner] for owner in held if owner not in ("buckets", "gathered units")} == {
        owner: size for owner, size in held.items() if owner not in ("buckets", "gathered units")
    }
    found = fingerprint(partition, model)
    partition.close()
    model, optimizer, partition = make(Offload(), stage, dtype)
    train(partition, model, optimizer, range(4), 1)
    wrong += differing(fingerprint(partition, model), found)
    partition.close()
    return wrong


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_that_was_parked_goes_on_as_one_that_was_not(dtype: torch.dtype, on_disk: bool, tmp_path: Path) -> None:
    for stage, offload in ((0, Offload()), (2, Offload(states=Tier.HOST, ratio=0.5)), (3, Offload())):
        for wrong in run_ranks(_away_and_back, 2, offload, stage, dtype, str(tmp_path) if on_disk else ""):
            assert not wrong, stage
    assert not list(tmp_path.iterdir())


def _trouble(directory: str) -> list[str]:
    """What goes wrong on rank 1, in both directions, changes nothing on any rank."""
    model, optimizer, partition = make(Offload(), 3, torch.bfloat16)
    train(partition, model, optimizer, range(1), 1)
    before = fingerprint(partition, model)
    errors = []

    def fails(self: BlockFile, *args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def attempt(kind: str, call: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if zcomm.group_rank() == 1:
                patch.setattr(BlockFile, kind, fails)
            with pytest.raises((DiskFailed, RuntimeError)) as caught:
                call()
        errors.append(f"{type(caught.value).__name__} {caught.value}")

    attempt("write", lambda: partition.offload_states(directory=directory))
    wrong = differing(before, fingerprint(partition, model))
    train(partition, model, optimizer, range(1, 2), 1)
    before = fingerprint(partition, model)
    partition.offload_states(directory=directory)
    attempt("read", partition.reload_states)
    partition.reload_states()
    wrong += differing(before, fingerprint(partition, model))
    train(partition, model, optimizer, range(2, 3), 1)
    partition.close()
    own = [text.startswith("DiskFailed") for text in errors]
    others = [text.startswith("RuntimeError rank 1 could not") for text in errors]
    return wrong + [text for text in errors if not all(own if zcomm.group_rank() else others)]


def test_trouble_of_one_rank_leaves_all_of_them_as_they_were(tmp_path: Path) -> None:
    assert run_ranks(_trouble, 2, str(tmp_path)) == [[], []]
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_brought_back_is_told_and_everything_else_given_back(tmp_path: Path) -> None:
    model, optimizer, partition = make(Offload(), 0, torch.float32)
    train(partition, model, optimizer, range(1), 1)
    partition.offload_states(directory=str(tmp_path))
    region = next(tmp_path.glob("*/*.region"))
    with open(region, "r+b") as file:
        file.write(b"\xff" * 64)
    with pytest.raises(DiskCorrupt, match="load a checkpoint"):
        partition.reload_states()
    with pytest.raises(DiskCorrupt):
        partition.close()
    partition.close()
    assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("zpartition")]
    assert zpartition.shard(model, policy=zpartition.ZeroPolicy()).close() is None  # the module is free


def test_single_kinds_leave_the_others_where_they_are() -> None:
    model, optimizer, partition = make(Offload(), 0, torch.bfloat16)
    train(partition, model, optimizer, range(1), 1)
    held = partition.ledger()
    partition.offload_states([OffloadStateType.STATES, OffloadStateType.MASTERS])
    assert {owner for owner, size in partition.ledger().items() if size != held[owner]} == {"states", "masters"}
    model(torch.ones(1, 24, dtype=torch.bfloat16), True)  # weights are there
    assert not any(value.isnan().any() for value in model.state_dict().values())
    partition.reload_states()
    assert partition.ledger() == held
    partition.close()


def test_in_the_middle_of_a_step_it_is_rejected() -> None:
    model, _, partition = make(Offload(), 0, torch.float32)
    backward(partition, model, 0, 1)
    with pytest.raises(ValueError, match="call it between steps"):
        partition.offload_states()
    partition.close()
