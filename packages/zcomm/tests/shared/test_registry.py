"""The transport of a group, which ends with the group."""

from __future__ import annotations

import gc
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm.shared import native, registry
from zcomm.shared.transport import Message
from zcomm.testing import run_ranks

needs_extension = pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())


def test_a_world_of_one_has_no_transport() -> None:
    assert zcomm.transport() == "none"
    assert zcomm.transport_reason() == "torch.distributed is not initialised: a world of one"
    registry.close_all()


def rank_asks() -> list[tuple[str, str]]:
    found = [(zcomm.transport(), zcomm.transport_reason())]
    zcomm.barrier()
    found.append((zcomm.transport(), zcomm.transport_reason()))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    found.append((zcomm.transport(alone), zcomm.transport_reason(alone)))
    return found


@needs_extension
def test_the_transport_is_decided_by_the_first_collective() -> None:
    undecided = ("none", "not decided yet: the group has not communicated")
    alone = ("none", "the group has one rank")
    for found in run_ranks(rank_asks, 2):
        assert found == [undecided, ("shared memory", "all 2 ranks are on one host"), alone]


def rank_offers_others_work() -> list[bool]:
    return [
        registry.issue(None, Message("all_reduce", tensor, tensor, "sum")) is None
        for tensor in (torch.ones(2, dtype=torch.int16), torch.ones(2, device="meta"))
    ]


def test_what_cannot_go_through_memory_is_left_to_the_back_end() -> None:
    assert run_ranks(rank_offers_others_work, 2) == [[True, True]] * 2


def resources() -> tuple[int, int, int]:
    """Open descriptors, threads, and mappings of ours."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("memfd:zcomm")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings


def use_and_destroy(group: dist.ProcessGroup) -> None:
    tensor = zcomm.shared_empty(50_000, torch.float32, group)
    zcomm.all_reduce(tensor, group, async_op=True).wait()
    zcomm.all_reduce(torch.ones(10), group)
    assert zcomm.transport(group) == "shared memory"
    zcomm.barrier(group)


def rank_makes_many_groups(times: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    zcomm.barrier()
    before = (0, 0, 0)
    for index in range(times):
        group = dist.new_group()
        use_and_destroy(group)
        dist.destroy_process_group(group)
        del group
        if index == 4:  # Gloo itself has warmed up
            before = resources()
    return before, resources()


@needs_extension
def test_fifty_groups_leave_no_descriptor_no_thread_and_no_mapping() -> None:
    for before, after in run_ranks(rank_makes_many_groups, 2, 50):
        assert after == before


def rank_closes_all() -> list[int]:
    groups = [dist.new_group() for _ in range(3)]
    for group in groups:
        use_and_destroy(group)
    during = resources()[2]
    kept = zcomm.shared_empty(1000)
    dist.barrier()
    registry.close_all()
    after = resources()[2]
    kept.fill_(3)  # ordinary memory of this rank from now on
    assert kept.sum().item() == 3000
    del kept
    return [during, after, resources()[2]]


@needs_extension
def test_closing_unmaps_all_but_tensors_that_live() -> None:
    assert run_ranks(rank_closes_all, 2) == [[6, 1, 0]] * 2


def rank_keeps_a_destroyed_group() -> tuple[int, int]:
    group = dist.new_group()
    zcomm.barrier(group)
    dist.destroy_process_group(group)
    before = resources()[2]
    zcomm.barrier()  # the next set-up looks around
    return before, resources()[2]


@needs_extension
def test_a_destroyed_group_with_references_is_closed_at_the_next_set_up() -> None:
    assert run_ranks(rank_keeps_a_destroyed_group, 2) == [(2, 2)] * 2


def rank_makes_a_world_of_its_own(address: str, port: int) -> int:
    dist.destroy_process_group()
    environ = {**os.environ, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    with zcomm.init(environ=environ, timeout_s=20):
        zcomm.barrier()
        assert zcomm.transport() == "shared memory"
    return resources()[2]


@needs_extension
def test_nothing_is_mapped_after_the_world_is_closed() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run_ranks(rank_makes_a_world_of_its_own, 2, "127.0.0.1", port) == [0, 0]
