"""Gather and scatter over Gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm import gloo
from zcomm.testing import run_ranks


def _in_place_scatter_equals_all_reduce(world_size: int) -> bool:
    rank = zcomm.group_rank()
    values = torch.randn(world_size * 1000, generator=torch.Generator().manual_seed(rank))
    summed = values.clone()
    zcomm.all_reduce(summed)
    own = slice(rank * 1000, (rank + 1) * 1000)
    zcomm.reduce_scatter(values[own], values)
    return torch.equal(values[own], summed[own])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_an_in_place_scatter_sums_in_the_order_of_an_all_reduce(world_size):
    assert all(run_ranks(_in_place_scatter_equals_all_reduce, world_size, world_size))


def _gather_in_subgroups() -> list[int]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    output = torch.empty(4, dtype=torch.bfloat16)
    zcomm.all_gather(output, torch.full((2,), rank, dtype=torch.bfloat16), groups[rank % 2])
    return output.int().tolist()


def test_a_gather_in_a_subgroup_addresses_its_own_ranks():
    assert run_ranks(_gather_in_subgroups, 4) == [[0, 0, 2, 2], [1, 1, 3, 3]] * 2


def _handles() -> tuple[bool, list[float]]:
    output = torch.empty(6)
    handle = zcomm.all_gather(output, torch.full((3,), float(zcomm.group_rank())), async_op=True)
    handle.wait()
    handle.wait()
    return handle.is_done(), output.tolist()


def test_several_messages_are_one_handle():
    assert run_ranks(_handles, 2) == [(True, [0.0] * 3 + [1.0] * 3)] * 2


def _empty() -> int:
    output = torch.empty(0)
    zcomm.all_gather(output, torch.empty(0))
    return output.numel()


def test_nothing_can_be_gathered():
    assert run_ranks(_empty, 2) == [0, 0]


def _carried() -> bool:
    return gloo.is_used(torch.ones(1), None)


def test_a_cpu_tensor_of_a_gloo_group_is_carried_by_gloo():
    assert all(run_ranks(_carried, 2))


class SlowWork:
    """A Work over Gloo: a wait in a slice gives up `num_slices` times; then the collective ends as the test says."""

    def __init__(self, num_slices: int, error: str = "", *, ends_late: bool = False) -> None:
        self.left, self.error, self.ends_late = num_slices, error, ends_late

    def wait(self, *slices: object) -> None:
        if self.left and slices:
            self.left -= 1
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.left == 0 or self.ends_late


def test_the_end_of_a_slice_is_not_the_end_of_the_wait() -> None:
    work = SlowWork(3)
    assert [gloo.wait_slice(work) for _ in range(4)] == [False, False, True, True]  # type: ignore[arg-type]


def test_a_collective_that_ends_just_after_a_slice_has_not_failed() -> None:
    assert gloo.wait_slice(SlowWork(1, ends_late=True))  # type: ignore[arg-type]


def test_the_collectives_own_error_comes_out_of_a_slice() -> None:
    for work in (SlowWork(0, "Connection reset"), SlowWork(1, "Connection reset", ends_late=True)):
        with pytest.raises(RuntimeError, match="Connection reset"):
            gloo.wait_slice(work)  # type: ignore[arg-type]


def calls_in_another_order(equal: bool) -> str:
    """Gather two units in another order on rank 1; return the error."""
    rank = dist.get_rank()
    sizes = {"first": 4, "second": 4 if equal else 900}
    for label in ("first", "second") if rank == 0 else ("second", "first"):
        own = torch.full((sizes[label],), float(rank))
        output = torch.empty(2 * sizes[label])
        try:
            zcomm.all_gather(output, own, async_op=True, label=f"unit {label!r}", agreed=True).wait()
        except zcomm.CollectiveFailed as error:
            return str(error)
    return ""


@pytest.mark.parametrize("equal", [True, False])
def test_over_gloo_agreed_gathers_of_different_calls_name_both(equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMM_TRANSPORT", "gloo")
    numel = 4 if equal else 900
    for text in run_ranks(calls_in_another_order, 2, equal):
        assert (
            "the ranks disagree: rank 0 calls all_gather \"unit 'first'\" of 4 torch.float32 a rank, "
            f"rank 1 all_gather \"unit 'second'\" of {numel} torch.float32 a rank."
        ) in text
