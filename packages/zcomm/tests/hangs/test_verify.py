"""Verify mode: mistakes that the back end does not detect raise before data moves."""

from __future__ import annotations

import threading

import attrs
import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm.hangs.fingerprint import Call, Ring
from zcomm.hangs.side_channel import SideChannel
from zcomm.hangs.verify import Verifier, no_verification
from zcomm.testing import run_ranks


@pytest.fixture(autouse=True)
def verify_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMM_VERIFY", "1")


def failure_of_a_sum(value: float, op: str, label: str) -> str:
    """Return the error message and the tensor afterwards."""
    tensor = torch.tensor([value])
    with pytest.raises(zcomm.CollectiveFailed) as caught:
        zcomm.all_reduce(tensor, op=op, label=label)
    assert tensor.item() == value, "data moved"
    return str(caught.value)


def rank_reduces_differently() -> str:
    return failure_of_a_sum(1.0, "max" if dist.get_rank() == 1 else "sum", "loss")


@pytest.mark.parametrize("world_size", [2, 4])
def test_another_reduction_raises_on_every_rank(world_size: int) -> None:
    for message in run_ranks(rank_reduces_differently, world_size):
        assert "not issued: the ranks called different collectives: rank 0 all_reduce sum float32[1]" in message
        assert "Rank 1's collective 1 is all_reduce max 'loss' of float32[1]" in message


def rank_swaps_two() -> str:
    labels = ["a", "b"] if dist.get_rank() == 0 else ["b", "a"]
    return failure_of_a_sum(2.0, "sum", labels[0])


def test_two_swapped_sums_of_one_shape_are_found_by_their_labels() -> None:
    for message in run_ranks(rank_swaps_two, 2):
        assert "The labels of collective 1 of the default group differ (rank 0 'a'; rank 1 'b')" in message


def rank_sums_more() -> str:
    tensor = torch.ones(3 if dist.get_rank() == 0 else 5)
    with pytest.raises(zcomm.CollectiveFailed) as caught:
        zcomm.all_reduce(tensor, label="norm")
    return str(caught.value)


def test_sizes_that_differ_raise_where_gloo_would_abort_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMM_TRANSPORT", "gloo")
    for message in run_ranks(rank_sums_more, 2):
        assert "Rank 1's collective 1 is all_reduce sum 'norm' of float32[5]" in message


def rank_agrees() -> list[float]:
    size = dist.get_world_size()
    group = dist.new_group([0, 1])
    results = []
    for step in range(5):
        tensor = torch.tensor([1.0])
        handle = zcomm.all_reduce(tensor, async_op=True, label=f"step {step}")
        if dist.get_rank() < 2:
            zcomm.barrier(group)
        handle.wait()
        results.append(tensor.item() / size)
    return results


def test_ranks_that_agree_notice_nothing() -> None:
    assert run_ranks(rank_agrees, 3) == [[1.0] * 5] * 3


def verifiers(size: int, timeout_s: float) -> tuple[list[Verifier], list[Ring]]:
    store = dist.HashStore()
    ranks = tuple(range(size))
    ends = [Verifier(SideChannel.open(store, rank, size), lambda: False) for rank in ranks]
    return ends, [Ring("0", ranks, "gloo", timeout_s) for _ in ranks]


def test_keys_do_not_pile_up() -> None:
    ends, rings = verifiers(2, 30.0)

    def issue(rank: int) -> None:
        for _ in range(20):
            ends[rank].verify(rings[rank].add(Call("barrier", "", 2), None))

    threads = [threading.Thread(target=issue, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [key for key in ends[0].store.list_keys() if "verify" in key]
    assert len(left) == 2, "one a rank: that of the last collective"


def test_a_rank_that_does_not_come_is_named() -> None:
    (first, _), (ring, _) = verifiers(2, 0.05)
    with pytest.raises(RuntimeError, match=r"not issued: rank 1 did not reach this collective within 0\.05 s"):
        first.verify(ring.add(Call("barrier", "", 2), None))


def test_an_aborted_world_is_not_waited_for() -> None:
    (first, _), (ring, _) = verifiers(2, 30.0)
    impatient = attrs.evolve(first, is_aborted=lambda: True)
    with pytest.raises(RuntimeError, match="another rank failed"):
        impatient.verify(ring.add(Call("barrier", "", 2), None))


def test_without_verification_every_collective_is_accepted() -> None:
    no_verification(Ring("", ()).add(Call("barrier", "", 2), None))
