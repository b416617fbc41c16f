"""Every tier gives the bits of none: same optimizer code, same order, other memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zpartition
from zcomm.testing import run_ranks
from zpartition import Offload, Speculation, Tier
from zpartition.disk import DiskStore
from zpartition.testing import differing, fingerprint, make, train
from zpartition.tiers import open_store


def fail(partition: zpartition.Partition, model: nn.Module, dtype: torch.dtype) -> None:
    with partition.micro_step():
        model(torch.ones(2, 24, dtype=dtype), True).backward()
        raise RuntimeError("on purpose")


def _run(offload: Offload, stage: int, dtype: torch.dtype, accumulation: int, fails: bool) -> dict[str, Tensor]:
    model, optimizer, partition = make(offload, stage, dtype)
    train(partition, model, optimizer, range(3), accumulation)
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            fail(partition, model, dtype)
    train(partition, model, optimizer, range(3, 5), accumulation)
    found = fingerprint(partition, model)
    partition.close()
    return found


def _differing(offloads: dict[str, Offload], stage: int, dtype: torch.dtype, accumulation: int) -> list[str]:
    """What differs from no offload at all, where the other runs have an exception in a backward in between."""
    without = _run(Offload(), stage, dtype, accumulation, False)
    return [
        f"{tier}: {name}"
        for tier, offload in offloads.items()
        for name in differing(without, _run(offload, stage, dtype, accumulation, True))
    ]


def _offloads(stage: int, directory: str) -> dict[str, Offload]:
    found = {
        "host": Offload(states=Tier.HOST),
        "part of it": Offload(states=Tier.HOST, ratio=0.5, step_numel=5000),
        "ahead": Offload(states=Tier.HOST, speculation=Speculation.LAST_BACKWARD),
        "disk": Offload(states=Tier.DISK, directory=directory),
        "part on disk": Offload(states=Tier.DISK, directory=directory, ratio=0.5, step_numel=5000, buffer_count=2),
    }
    weights = {
        "weights on host": Offload(weights=Tier.HOST),
        "weights on disk": Offload(weights=Tier.DISK, directory=directory),
        "all on host": Offload(weights=Tier.HOST, states=Tier.HOST),
        "all on disk": Offload(weights=Tier.DISK, states=Tier.DISK, directory=directory),
    }
    return {**found, **weights} if stage == 3 else found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_no_tier_changes_a_bit(world_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    stages = (0, 1, 2, 3) if world_size < 4 else (2, 3)
    for stage in stages:
        accumulation = 3 if (stage % 2 == 0) == (dtype is torch.float32) else 1
        offloads = _offloads(stage, str(tmp_path))
        if world_size == 4:
            offloads = {tier: offloads[tier] for tier in ("ahead", "part on disk", "all on disk") if tier in offloads}
        for wrong in run_ranks(_differing, world_size, offloads, stage, dtype, accumulation):
            assert not wrong, stage
    assert not list(tmp_path.iterdir()), "a store was left behind"


def _together(directory: str) -> list[str]:
    wrong = []
    for stage, more in ((2, {"shard_group_size": 2}), (3, {"weight_bits": 8})):
        found = []
        for offload in (
            Offload(),
            Offload(states=Tier.HOST, weights=Tier.HOST, speculation=Speculation.LAST_BACKWARD),
            Offload(states=Tier.DISK, weights=Tier.DISK, directory=directory),
        ):
            model, optimizer, partition = make(offload, stage, torch.bfloat16, **more)
            train(partition, model, optimizer, range(3), 1)
            found.append(fingerprint(partition, model))
            partition.close()
        wrong += [name for other in found[1:] for name in differing(found[0], other)]
    return wrong


def test_offload_goes_with_shard_groups_and_quantised_gathers(tmp_path: Path) -> None:
    for wrong in run_ranks(_together, 4, str(tmp_path)):
        assert not wrong


def test_a_fork_that_ends_leaves_the_files_to_its_parent(tmp_path: Path) -> None:
    store = open_store(Offload(states=Tier.DISK, directory=str(tmp_path)), None)
    if (child := os.fork()) == 0:
        del store
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    store.allocate("something", 10)
    assert store.commit() == 1
    store.close(remove=True)
    assert not os.listdir(tmp_path)


def test_files_go_with_the_partition_and_a_killed_run_s_with_the_next(tmp_path: Path) -> None:
    disk = Offload(states=Tier.DISK, directory=str(tmp_path))
    left = DiskStore.create(tmp_path / "rank0-killed")
    left.allocate("something", 10_000)
    left.close()  # as when the process ends: the lock goes, the files stay
    model, optimizer, partition = make(disk, 0, torch.float32)
    second = make(disk, 0, torch.float32)[2]  # leaves the first one's alone
    train(partition, model, optimizer, range(2), 1)
    assert "rank0-killed" not in os.listdir(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    second.close()
    del partition, model, optimizer, second
    gc.collect()
    assert not os.listdir(tmp_path)
