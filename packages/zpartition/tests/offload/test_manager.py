"""Every tier gives the same bits."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zpartition
from zcomm.testing import run_ranks
from zpartition import Offload, Speculation, Tier
from zpartition.disk import DiskStore
from zpartition.offload.manager import open_store
from zpartition.testing import backward, differing, fingerprint, make, train


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


class Late:
    """A mover whose copies arrive when they are waited for and no sooner: until then what they fill reads as NaN."""

    staging_bytes = in_flight_bytes = 0

    def __init__(self) -> None:
        self.down: list[Callable[[], object]] = []
        self.up: list[Callable[[], object]] = []
        self.lock = threading.RLock()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.full((numel,), torch.nan, dtype=dtype)

    def fetch(self, host: Tensor, device: Tensor, factor: float) -> None:
        values = device.detach().to(host.dtype, copy=True).mul_(factor)
        self._go(self.down, functools.partial(host.data.copy_, values), host)

    def add(self, host: Tensor, device: Tensor, factor: float) -> None:
        self.wait_host()  # what is there already; torch adds the rest in the same way
        total = host.detach().add(device.detach(), alpha=factor)
        self._go(self.down, functools.partial(host.data.copy_, total), host)

    def send(self, device: Tensor, host: Tensor) -> None:
        self._go(self.up, functools.partial(device.data.copy_, host.detach().clone()), device)

    def _go(self, line: list[Callable[[], object]], copy: Callable[[], object], into: Tensor) -> None:
        with self.lock:
            into.data.fill_(torch.nan)
            line.append(copy)

    def _arrive(self, line: list[Callable[[], object]]) -> None:
        with self.lock:
            while line:
                line.pop(0)()

    def ready(self) -> None: ...

    def wait_for(self, mark: object) -> None:
        self.wait_host()

    def wait_host(self) -> None:
        self._arrive(self.down)

    def wait_device(self) -> None:
        self._arrive(self.up)


def _late(stage: int, dtype: torch.dtype, directory: str) -> list[str]:
    offloads = _offloads(stage, directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zpartition.offload.manager.make_mover", lambda device, offload: Late())
        return [*_differing(offloads, stage, dtype, 2), *_interrupted(Offload(states=Tier.HOST), stage, dtype)]


def _interrupted(offload: Offload, stage: int, dtype: torch.dtype) -> list[str]:
    """Weights that are not there after a step that failed between two groups."""
    model, optimizer, partition = make(offload, stage, dtype)
    train(partition, model, optimizer, range(1), 1)
    backward(partition, model, 1, 1)
    partition.finish_gradients()
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError
        optimizer.step()

    with pytest.raises(ArithmeticError):
        partition.apply(step)
    partition.zero_grad()
    wrong = [name for name, value in model.state_dict().items() if value.isnan().any()]
    partition.close()
    return wrong


def test_nobody_reads_what_is_still_on_its_way(tmp_path: Path) -> None:
    for stage, dtype in ((1, torch.bfloat16), (3, torch.float32)):
        for wrong in run_ranks(_late, 2, stage, dtype, str(tmp_path)):
            assert not wrong


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
