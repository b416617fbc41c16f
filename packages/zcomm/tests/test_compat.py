"""Assumptions about the installed torch.  These fail when a new torch moves something."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm import compat
from zcomm.testing import run_ranks


def rank_times_out_after() -> float:
    group = dist.new_group(timeout=timedelta(seconds=77))
    return compat.group_timeout_s(group, torch.device("cpu"), default=-1.0)


def test_the_timeout_of_a_group_can_still_be_read() -> None:
    assert run_ranks(rank_times_out_after, 1) == [77.0]


def test_without_an_answer_the_given_timeout_is_returned() -> None:
    assert compat.group_timeout_s(object(), torch.device("cpu"), default=12.0) == 12.0


def rank_names_its_back_ends() -> list[str]:
    return [compat.backend_of(), compat.backend_of(dist.new_group(backend="undefined"))]


def test_a_back_end_that_was_not_named_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(rank_names_its_back_ends, 1) == [["gloo", "gloo"]]
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert compat.backend_of() == "cpu:gloo,cuda:nccl"


def rank_listens_for_warnings() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zcomm.all_gather(torch.zeros(2), torch.zeros(1))
        zcomm.reduce_scatter(torch.zeros(1), torch.zeros(2))
    return [str(warning.message) for warning in caught]


def test_the_flat_collectives_use_names_that_torch_does_not_warn_about() -> None:
    assert run_ranks(rank_listens_for_warnings, 2) == [[], []]


def rank_reads_its_store() -> list[str]:
    store = compat.default_store()
    clone = compat.clone_store(store)
    assert type(store).clone is not None
    clone.set(f"from {dist.get_rank()}", "x")
    return [store.get(f"from {rank}").decode() for rank in range(2)]


def test_the_store_of_the_default_group_can_still_be_reached_and_cloned() -> None:
    assert run_ranks(rank_reads_its_store, 2) == [["x", "x"], ["x", "x"]]


def test_without_a_default_group_or_a_clone_there_is_a_plain_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.default_store() is None
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    assert compat.default_store() is None
    plain = object()
    assert compat.clone_store(plain) is plain


def rank_makes_a_link(key: str) -> tuple[list[float], str]:
    """Move bytes over a link, wait at a barrier, and break it from one end."""
    rank = dist.get_rank()
    link = compat.open_gloo_link(key, rank, 2, connect_s=20.0, timeout_s=60.0)
    tensor = torch.full((2,), float(rank))
    compat.link_broadcast(link, tensor, 1).wait()
    compat.link_barrier(link).wait()
    if rank == 0:
        compat.break_link(link, peer=1)
    with pytest.raises(RuntimeError) as caught:
        compat.link_barrier(link).wait()
    return tensor.tolist(), str(caught.value)


def test_a_link_is_gloo_without_a_group_and_can_be_broken() -> None:
    for values, text in run_ranks(rank_makes_a_link, 2, "test"):
        assert values == [1.0, 1.0]
        assert "imed out" not in text.replace("Application timeout", ""), "it is broken, nobody waited for a limit"


def test_what_a_gpu_s_queue_has_under_way_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        aborted = 0

        def abort(self) -> None:
            self.aborted += 1
            raise RuntimeError("aborted before")

    group = Group()
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    compat.close_group(group, 0)
    assert group.aborted == 1
    assert hasattr(dist.ProcessGroup, "abort")


def test_a_link_without_a_default_group_raises() -> None:
    with pytest.raises(RuntimeError, match="does not expose the default group's store"):
        compat.open_gloo_link("test", 0, 2, connect_s=1.0, timeout_s=1.0)


def rank_waits_for_a_link(key: str) -> tuple[bool, float]:
    """Time out after `connect_s` without a peer, and after `timeout_s` with a late one."""
    began_s, rank = time.monotonic(), dist.get_rank()
    with pytest.raises(RuntimeError):
        compat.open_gloo_link(f"{key} {rank}", rank, 2, connect_s=0.2, timeout_s=300.0)
    is_soon = time.monotonic() - began_s < 60
    link = compat.open_gloo_link(key, rank, 2, connect_s=20.0, timeout_s=77.0)
    return is_soon, link.options._timeout.total_seconds()


def test_connecting_times_out_before_a_message_does() -> None:
    assert run_ranks(rank_waits_for_a_link, 2, "late") == [(True, 77.0)] * 2


def links_dropped_at_once(key: str) -> int:
    """Make many links and drop each at once; return their number."""
    rank = dist.get_rank()
    return len(
        [str(compat.open_gloo_link(f"{key} {n}", rank, 2, connect_s=20.0, timeout_s=20.0)) for n in range(100)]
    )


def test_a_link_dropped_at_once_does_not_close_on_a_peer_that_is_still_connecting() -> None:
    assert run_ranks(links_dropped_at_once, 2, "dropped") == [100, 100]


def groups_after_uneven_numbers_of_others() -> list[float]:
    """Make two groups on ranks 0 and 1 only, then pairs across, twice."""
    rank, sums = dist.get_rank(), []
    if rank < 2:
        compat.new_group([0, 1])
        compat.new_group([0, 1])
    for _ in range(2):
        group, number = compat.new_group([rank % 2, rank % 2 + 2]), torch.tensor([float(rank)])
        dist.all_reduce(number, group=group)
        sums.append(number.item())
    return sums


def test_ranks_with_different_earlier_groups_form_a_group() -> None:
    assert run_ranks(groups_after_uneven_numbers_of_others, 4) == [[2.0, 2.0], [4.0, 4.0]] * 2


@pytest.mark.parametrize("has_foreach", [True, False])
def test_lists_of_tensors_are_one_call_or_a_loop(has_foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("_foreach_norm", "_foreach_add_", "_foreach_copy_")
    assert all(getattr(compat, name) is not None for name in names), "this torch has moved them"
    for name in () if has_foreach else names:
        monkeypatch.setattr(compat, name, None)
    tensors = [torch.tensor([3.0, 4.0]), torch.ones(1)]
    assert [norm.item() for norm in compat.foreach_norm(tensors)] == [5.0, 1.0]
    compat.foreach_add_(tensors, [torch.ones(2), torch.ones(1)])
    assert [tensor.tolist() for tensor in tensors] == [[4.0, 5.0], [2.0]]
    compat.foreach_copy_(tensors, [torch.zeros(2), torch.ones(1)])
    assert [tensor.tolist() for tensor in tensors] == [[0.0, 0.0], [1.0]]
    compat.foreach_add_([], [])
    compat.foreach_copy_([], [])
