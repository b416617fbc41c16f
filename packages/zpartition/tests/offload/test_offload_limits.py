"""Limits of offload: sizes and number of file calls, host memory of weights on disk, cores of a speculative step."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import Offload, Speculation, Tier, ZeroPolicy
from zpartition import partition as partition_module
from zpartition.disk import DiskStore
from zpartition.disk.system import System
from zpartition.estimate.memory import plan
from zpartition.memory.mover import PlainMover
from zpartition.memory.placement import DiskParams, HostParams
from zpartition.testing import Net, differing, fingerprint, make, train

MANY = 10**6


@attrs.define
class Calls:
    """The file calls of a run: bytes of each, and how many were in flight at once."""

    sizes: list[int] = attrs.field(factory=list)
    most: int = 0
    now: int = 0
    lock: Any = attrs.field(factory=threading.Lock)

    @contextlib.contextmanager
    def call(self, num_bytes: int) -> Iterator[None]:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.sizes.append(num_bytes)
        time.sleep(0.002)  # or a call on a fast drive is over before the next begins
        yield
        with self.lock:
            self.now -= 1


@contextlib.contextmanager
def watched_calls() -> Iterator[Calls]:
    calls, write, read = Calls(), System.write, System.read

    def slow_write(self: System, fd: int, data: memoryview, offset: int) -> int:
        with calls.call(len(data)):
            return write(self, fd, data, offset)

    def slow_read(self: System, fd: int, into: memoryview, offset: int) -> int:
        with calls.call(len(into)):
            return read(self, fd, into, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(System, "write", slow_write)
        patch.setattr(System, "read", slow_read)
        yield calls


def trained(offload: Offload, stage: int = 2) -> dict[str, Tensor]:
    """Weights and states after four steps."""
    model, optimizer, partition = make(offload, stage, torch.float32)
    train(partition, model, optimizer, range(4), 1)
    found = fingerprint(partition, model)
    partition.close()
    return found


@pytest.mark.parametrize(
    ("threads", "depth", "block", "largest"), [(1, 1, 4096, 4096), (2, 3, 5000, 8192), (2, 1, 1 << 20, 24576)]
)
def test_calls_have_the_size_of_a_block_and_so_many_are_in_flight(
    threads: int, depth: int, block: int, largest: int, tmp_path: Path
) -> None:
    """The largest region of this model has 24,576 bytes: two moments of a bucket."""
    plain = trained(Offload())
    sizes = {"num_threads": threads, "queue_depth": depth, "block_bytes": block}
    with watched_calls() as calls:
        found = trained(Offload(states=Tier.DISK, directory=str(tmp_path), **sizes))
    assert not differing(plain, found)
    assert max(calls.sizes) == largest
    assert calls.most == threads * depth


def _placed(directory: str, max_numel: int) -> tuple[list[str], dict[str, int], dict[str, int], dict[str, int]]:
    offload = Offload(weights=Tier.DISK, directory=directory, host_weight_numel=max_numel)
    model, optimizer, partition = make(offload, 3, torch.bfloat16)
    train(partition, model, optimizer, range(3), 1)
    held = {"host": 0, "disk": 0}
    for storage in partition.storages:
        place = getattr(storage, "param_placement", None)
        if isinstance(place, HostParams | DiskParams):
            held["host" if isinstance(place, HostParams) else "disk"] += storage.bucket.span_numel
    policy, live = partition.policy, partition.ledger()
    planned = plan(Net(torch.bfloat16), policy=policy, world_size=zcomm.group_size(), optimizer=torch.optim.AdamW)
    found = fingerprint(partition, model)
    partition.close()
    model, optimizer, partition = make(Offload(), 3, torch.bfloat16)
    train(partition, model, optimizer, range(3), 1)
    wrong = differing(fingerprint(partition, model), found)
    partition.close()
    return wrong, held, {k: v for k, v in live.items() if "parameters" in k}, planned.ledger()


@pytest.mark.parametrize("world_size", [2, 4])
def test_weights_up_to_a_number_of_elements_stay_on_the_host(world_size: int, tmp_path: Path) -> None:
    limit = 5000 // world_size
    for wrong, held, live, planned in run_ranks(_placed, world_size, str(tmp_path), limit):
        assert not wrong
        assert limit - 3072 // world_size < held["host"] <= limit
        assert held["disk"] > 0
        assert live["host parameters"] == planned["host parameters"] == 2 * held["host"]
        assert live["disk parameters"] == planned["disk parameters"] == 2 * 2 * held["disk"]
    for wrong, held, live, _ in run_ranks(_placed, world_size, str(tmp_path), MANY):
        assert not wrong
        assert held["disk"] == 0
        assert "disk parameters" not in live


@contextlib.contextmanager
def watched_buffers() -> Iterator[list[int]]:
    """The bytes of a store's buffers that are alive, after each new one."""
    alive: dict[int, int] = {}  # by number: the threads of a store drop buffers, too
    seen: list[int] = []
    numbers, make_buffer = itertools.count(), DiskStore.buffer

    def counted(self: DiskStore, num_bytes: int) -> Tensor:
        buffer, number = make_buffer(self, num_bytes), next(numbers)
        alive[number] = num_bytes
        weakref.finalize(buffer, alive.pop, number)
        seen.append(sum(list(alive.values())))
        return buffer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskStore, "buffer", counted)
        yield seen


def _peaks(directory: str, **limits: int) -> tuple[list[str], int, int]:
    """What differs from weights on the device, the largest shard and the most bytes of buffers at once."""
    model, optimizer, partition = make(Offload(), 3, torch.float32)
    train(partition, model, optimizer, range(4), 1)
    plain, largest = fingerprint(partition, model), max(s.bucket.span_numel for s in partition.storages)
    partition.close()
    with watched_calls(), watched_buffers() as seen:
        found = trained(Offload(weights=Tier.DISK, directory=directory, **limits), stage=3)
    return differing(plain, found), 4 * largest, max(seen)


@pytest.mark.parametrize(("count", "numel"), [(1, 1), (2, 1600), (3, 1100)])
def test_weights_pass_through_so_many_buffers_of_such_a_size(count: int, numel: int, tmp_path: Path) -> None:
    limits = {"weight_buffer_count": count, "weight_buffer_numel": numel}
    limited = run_ranks(_peaks, 2, str(tmp_path), **limits)
    for (wrong, largest, peak), (_, _, without) in zip(limited, run_ranks(_peaks, 2, str(tmp_path)), strict=True):
        assert not wrong
        assert peak <= max(count * numel * 4, largest)
        assert without > 2 * largest, "without a limit nearly all shards are on their way at once"


class Counting(torch.optim.SGD):
    """SGD that notes the threads that torch uses where it runs."""

    elementwise = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.threads: dict[str, set[int]] = {}

    def step(self, closure: Any = None) -> Any:
        self.threads.setdefault(threading.current_thread().name.split("_")[0], set()).add(torch.get_num_threads())
        return super().step(closure)


def _threads_of_a_step(share: float, usable: int) -> tuple[dict[str, set[int]], int, int]:
    model, before = Net(torch.float32), torch.get_num_threads()
    optimizer = Counting(model.parameters(), lr=0.1)
    offload = Offload(states=Tier.HOST, speculation=Speculation.LAST_BACKWARD, core_share=share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_module, "_usable_cores", lambda: usable)
        made = zpartition.shard(model, optimizer, policy=ZeroPolicy(stage=2, bucket_numel=3000, offload=offload))
    train(made, model, optimizer, range(0, 4, 2), 1)
    made.close()
    later: list[int] = []
    other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    other.start()
    other.join()
    return optimizer.threads, before, later[0] if torch.get_num_threads() == before else -1


@pytest.mark.parametrize(("share", "usable", "expected"), [(0.5, 8, 4), (0.8, 7, 5), (0.01, 8, 1), (0.0, 8, None)])
def test_a_speculative_step_uses_a_share_of_the_cores_and_no_other_thread_does(
    share: float, usable: int, expected: int | None
) -> None:
    (found, before, later), *_ = run_ranks(_threads_of_a_step, 1, share, usable)
    assert found["zpartition-speculate"] == {before if expected is None else expected}
    assert later == before, "threads that start later, and this one, have the number from before"


def _fetched() -> list[int]:
    found: list[int] = []

    def fetch(self: PlainMover, host: Tensor, device: Tensor, factor: float) -> None:
        found.append(device.numel())
        host.copy_(device)
        if factor != 1.0:
            host.mul_(factor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainMover, "fetch", fetch)
        model, optimizer, partition = make(Offload(states=Tier.HOST), 2, torch.float32)
        train(partition, model, optimizer, range(1), 1)
        partition.close()
    return found


def test_every_rank_copies_the_same_share_of_every_bucket_to_the_host() -> None:
    """DeepSpeed's round_robin_gradients balances these copies; here every bucket is cut into equal spans."""
    ranks = run_ranks(_fetched, 4)
    assert len(ranks[0]) > 2, "several buckets"
    assert all(found == ranks[0] for found in ranks)
    total = sum(param.numel() for param in Net(torch.float32).parameters())
    assert 4 * sum(ranks[0]) >= total
