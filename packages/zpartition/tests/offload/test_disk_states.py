"""Disk placement of a bucket: out of memory between steps, but readable and writable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from zpartition.disk import DiskOptions, DiskStore
from zpartition.memory.mover import PlainMover
from zpartition.offload.disk_states import DiskPlacement, StateStore
from zpartition.state.optimizer_state import elements, is_coded

NUMEL = 5000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[StateStore]:
    made = StateStore(DiskStore.create(tmp_path / "store", DiskOptions(durable=False)), PlainMover())
    yield made
    made.store.close(remove=True)


def make(
    disk: StateStore, optimizer_class: Any = torch.optim.AdamW
) -> tuple[DiskPlacement, Parameter, Any, torch.Tensor]:
    weights = torch.randn(NUMEL).bfloat16()
    master = Parameter(torch.zeros(NUMEL))
    placement = DiskPlacement(disk, 0)
    placement.adopt(master)
    placement.refresh(master, weights)
    return placement, master, optimizer_class([master]), weights


def step(placement: DiskPlacement, master: Parameter, optimizer: Any, gradient: torch.Tensor) -> None:
    placement.disk.forget()
    memory, transfers = placement.begin_reading()
    for transfer in transfers:
        transfer.wait()
    placement.install(optimizer, master, memory)
    master.grad = gradient
    optimizer.step()
    kept, transfers = placement.write_back(optimizer, master)
    for transfer in transfers:
        transfer.wait()
    placement.disk.release(kept)
    placement.disk.store.commit()


def portable(state: Any) -> dict[str, torch.Tensor]:
    return {k: elements(v, 0, NUMEL) if is_coded(v) else torch.as_tensor(v).reshape(-1) for k, v in state.items()}


@pytest.mark.parametrize("kind", ["AdamW", "coded"])
def test_updates_are_those_of_an_optimizer_in_memory(disk: StateStore, coded_momentum: Any, kind: str) -> None:
    make_optimizer = torch.optim.AdamW if kind == "AdamW" else coded_momentum
    placement, master, optimizer, weights = make(disk, make_optimizer)
    plain = Parameter(weights.float())
    oracle = make_optimizer([plain])
    for seed in range(3):
        gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
        step(placement, master, optimizer, gradient)
        plain.grad = gradient
        oracle.step()
    assert torch.equal(placement.values(master), plain)
    found = portable(placement.state(optimizer, master))
    wanted = portable(oracle.state[plain] if kind == "AdamW" else oracle.portable_state(plain))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    placement.publish(master, weights)
    assert torch.equal(weights, plain.bfloat16())


def test_between_steps_nothing_is_in_memory(disk: StateStore) -> None:
    placement, master, optimizer, _ = make(disk)
    step(placement, master, optimizer, torch.ones(NUMEL))
    assert (master.stride(), master.shape, bool(master.isnan().all())) == ((0,), (NUMEL,), True)
    assert not optimizer.state
    assert disk.region_bytes == {"master": 2 * 4 * NUMEL, "states": 2 * 8 * NUMEL + 2 * (-4 * NUMEL % 64)}


def test_a_part_of_a_state_is_read_alone_and_no_file_twice_in_a_row(disk: StateStore) -> None:
    placement, master, optimizer, _ = make(disk)
    step(placement, master, optimizer, torch.ones(NUMEL))
    state = placement.state(optimizer, master)
    assert (state["exp_avg"].dtype, tuple(state["exp_avg"].shape)) == (torch.float32, (NUMEL,))
    first = state["exp_avg"].read(10, 13)
    cached = disk.cached
    assert torch.equal(first, state["exp_avg"].read(0, NUMEL)[10:13])
    assert disk.cached is cached
    assert state["step"] == 1


def test_state_that_is_given_and_values_that_are_written_are_on_disk(disk: StateStore) -> None:
    placement, master, optimizer, _ = make(disk)
    placement.set_state(
        optimizer,
        master,
        {k: torch.full((NUMEL,), 0.5) for k in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(7.0)},
    )
    placement.write(master, 3, torch.tensor([1.0, 2.0]))
    disk.forget()
    state = placement.state(optimizer, master)
    assert (float(state["exp_avg_sq"].read(4, 5)), float(state["step"])) == (0.5, 7.0)
    assert placement.values(master)[3:5].tolist() == [1.0, 2.0]
    old = dict(state)
    placement.set_state(
        optimizer, master, {**old, "exp_avg": torch.ones(NUMEL)}
    )  # one of them new, the others as they were
    state = placement.state(optimizer, master)
    assert (float(state["exp_avg"].read(4, 5)), float(state["exp_avg_sq"].read(4, 5))) == (1.0, 0.5)


def test_a_state_that_is_rejected_leaves_the_one_that_was_there(disk: StateStore, coded_momentum: Any) -> None:
    placement, master, optimizer, _ = make(disk, coded_momentum)
    step(placement, master, optimizer, torch.ones(NUMEL))
    before = portable(placement.state(optimizer, master))
    with pytest.raises(ValueError, match="momentum is missing"):
        placement.set_state(optimizer, master, {"step": torch.tensor(3)})
    after = portable(placement.state(optimizer, master))
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_what_an_undone_first_step_has_made_serves_the_next(disk: StateStore) -> None:
    placement, master, optimizer, _ = make(disk)
    taken = []
    for is_undone in (True, True, False):
        before = placement.contents
        memory, transfers = placement.begin_reading()
        for transfer in transfers:
            transfer.wait()
        placement.install(optimizer, master, memory)
        master.grad = torch.ones(NUMEL)
        optimizer.step()
        kept, transfers = placement.write_back(optimizer, master)
        for transfer in transfers:
            transfer.wait()
        disk.release(kept)
        if is_undone:
            placement.restore(optimizer, master, before)
            disk.store.discard()
            assert not placement.state(optimizer, master)
        else:
            disk.store.commit()
        taken.append(disk.store.allocated_bytes)
    assert taken[0] == taken[1] == taken[2]
    assert placement.state(optimizer, master)["step"] == 1


@pytest.mark.parametrize("kind", ["AdamW", "coded"])
def test_a_cleared_state_begins_anew(disk: StateStore, coded_momentum: Any, kind: str) -> None:
    placement, master, optimizer, _ = make(disk, torch.optim.AdamW if kind == "AdamW" else coded_momentum)
    placement.clear(optimizer, master)  # nothing is there: nothing happens
    step(placement, master, optimizer, torch.ones(NUMEL))
    once = portable(placement.state(optimizer, master))
    placement.clear(optimizer, master)
    assert not placement.state(optimizer, master)
    step(placement, master, optimizer, torch.ones(NUMEL))
    again = portable(placement.state(optimizer, master))
    assert all(torch.equal(once[key], again[key]) for key in once)


def test_a_staged_master_counts_from_publish_on(disk: StateStore) -> None:
    placement, master, _, weights = make(disk)
    staged = placement.stage()
    assert torch.equal(staged, weights.float())
    staged.fill_(2.0)
    placement.publish(master, weights)
    assert weights.eq(2.0).all()
    disk.forget()
    assert placement.values(master).eq(2.0).all()
    assert placement.staged is None
