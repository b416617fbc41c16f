"""Power cut between any two calls of any commit: the store opens at the old generation or the new one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from zpartition.disk import DiskMissing, DiskOptions, DiskStore

SIZES = {"a": 9000, "b": 4096, "c": 1}
OPTIONS = DiskOptions(num_threads=1, chunk_bytes=4096)


def values(name: str, generation: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * generation + ord(name))
    return torch.randint(0, 256, (SIZES[name],), generator=seed, dtype=torch.uint8)


@attrs.define
class Run:
    """A few commits, each different, and what they promise."""

    began: int = -1  # the newest generation whose commit was called
    done: int = -1  # and returned
    promised: dict[int, dict[str, torch.Tensor]] = attrs.field(factory=lambda: {0: {}})

    def commit(self, store: DiskStore, **written: int) -> None:
        self.began = store.generation + 1
        changed = {name: values(name, generation) for name, generation in written.items()}
        self.promised[self.began] = {**self.promised[self.began - 1], **changed}
        for name, tensor in changed.items():
            store.write(store.regions[name], tensor)
        assert store.commit() == self.began
        self.done = self.began

    def play(self, disk: Any, options: DiskOptions) -> None:
        self.began = 0
        with DiskStore.create("/model/rank-0", options, system=disk) as store:
            self.done = 0
            store.allocate("a", SIZES["a"])
            store.allocate("b", SIZES["b"])
            self.commit(store, a=1, b=1)
            self.commit(store, a=2)
            store.allocate("c", SIZES["c"])
            store.write(store.regions["a"], values("a", 77))
            self.commit(store, a=3, b=3)  # c lasts, without values
            store.write(store.regions["b"], values("b", 88))
            store.discard()
            self.commit(store, c=4)


def check_found(disk: Any, run: Run, options: DiskOptions) -> None:
    """The old or the new generation, all of it, and the store can be gone on with."""
    try:
        store = DiskStore.open("/model/rank-0", options, system=disk)
    except DiskMissing:
        assert run.done < 0, f"generation {run.done} is gone"
        return
    with store:
        assert store.generation in (run.done, run.began)
        for name, expected in run.promised[store.generation].items():
            found = torch.empty_like(expected)
            store.read(store.regions[name], found).wait()
            assert torch.equal(found, expected), (name, store.generation)
        store.allocate("later", 5)
        for region in store.regions.values():
            store.write(region, torch.ones(region.num_bytes, dtype=torch.uint8))
        store.commit()


def number_of_calls(model_disk: Any, options: DiskOptions) -> int:
    disk = model_disk()
    Run().play(disk, options)
    return int(disk.num_calls)


@pytest.mark.parametrize("direct", ["never", "always"])
def test_a_power_cut_after_any_call_leaves_the_old_or_the_new_generation(
    model_disk: Any, power_cut: type[Exception], survivals: dict[str, Callable[[], bool]], direct: str
) -> None:
    options = attrs.evolve(OPTIONS, direct=direct)
    total = number_of_calls(model_disk, options)
    assert total > 50
    generations = set()
    for number in range(total):
        run, disk = Run(), model_disk(number)
        with pytest.raises(power_cut):
            run.play(disk, options)
        generations.add(run.done)
        for keep in survivals.values():
            check_found(disk.survived(keep), run, options)
    assert generations == {-1, 0, 1, 2, 3}


def test_without_durability_the_death_of_the_process_after_any_call_loses_nothing(
    model_disk: Any, power_cut: type[Exception]
) -> None:
    options = attrs.evolve(OPTIONS, durable=False)
    for number in range(number_of_calls(model_disk, options)):
        run, disk = Run(), model_disk(number)
        with pytest.raises(power_cut):
            run.play(disk, options)
        check_found(disk.survived(lambda: True), run, options)


def test_the_model_catches_a_commit_without_syncs(
    model_disk: Any, power_cut: type[Exception], survivals: dict[str, Callable[[], bool]]
) -> None:
    """Else the tests above would prove nothing."""
    options = attrs.evolve(OPTIONS, durable=False)
    caught = 0
    for number in range(number_of_calls(model_disk, options)):
        run, disk = Run(), model_disk(number)
        with pytest.raises(power_cut):
            run.play(disk, options)
        try:
            check_found(disk.survived(survivals["half 0"]), run, options)
        except Exception:
            caught += 1
    assert caught > 10


WRITER = """
import sys, torch
from zpartition.disk import DiskOptions, DiskStore
store = DiskStore.create(sys.argv[1], DiskOptions(durable=False, chunk_bytes=1 << 16))
regions = [store.allocate(name, 3_000_001) for name in "ab"]
for generation in range(1, 10**9):
    for region in regions:
        store.write(region, torch.full((3_000_001,), generation % 251, dtype=torch.uint8)).wait()
    print(store.commit(), flush=True)
"""


def test_kill_9_in_the_middle_of_writing_leaves_the_last_commit(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    time.sleep(0.003)
    process.kill()
    told = [int(line) for line in process.stdout.read().split()]
    process.wait()
    process.stdout.close()
    with DiskStore.open(folder) as store:
        assert store.generation >= max(told, default=3)
        for region in store.regions.values():
            found = torch.empty(region.num_bytes, dtype=torch.uint8)
            store.read(region, found).wait()
            assert (found == store.generation % 251).all()
