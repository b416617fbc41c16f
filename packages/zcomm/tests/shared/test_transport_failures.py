"""Ranks that die, stall, leave, disagree or are interrupted: every other rank raises, and none hangs.

Most tests speak to the transport itself, below `zcomm`'s verbs and what these add to an error.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zcomm import compat
from zcomm.shared import native, registry
from zcomm.shared.transport import Message, SharedMemoryFailed, Transport
from zcomm.testing import RankFailed, run_ranks
from zcomm.testing.failure import Ending

pytestmark = pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())


def transport(group: ProcessGroup | None = None) -> Transport:
    found = registry.transport_of(group)
    assert found is not None
    return found


def reduce(tensor: Tensor, group: ProcessGroup | None = None, *, label: str = "", overlap: bool = False) -> None:
    message = Message("all_reduce", tensor, tensor, "sum", label=label, overlap=overlap)
    transport(group).issue(message).wait()


def error_of(*args: object, **options: object) -> str:
    """Error of a collective that must fail."""
    with pytest.raises(SharedMemoryFailed) as caught:
        reduce(*args, **options)  # type: ignore[arg-type]
    return str(caught.value)


def rank_is_killed(overlap: bool) -> None:
    pids = zcomm.all_gather_object(os.getpid())
    reduce(torch.ones(1))
    if zcomm.group_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    first = error_of(torch.ones(5), label="grad_bucket[7]", overlap=overlap)
    later = error_of(torch.ones(5), label="other", overlap=overlap)
    raise AssertionError(f"{first} | {later}".replace(str(pids[1]), "PID"))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_killed_rank_is_named_by_all_others(world_size: int, overlap: bool) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(rank_is_killed, world_size, overlap)
    reports = {report.rank: report for report in caught.value.reports}
    assert reports[1].ending is Ending.DIED
    for rank in set(range(world_size)) - {1}:
        first, _, later = reports[rank].text.rpartition(" | ")
        assert "rank 1 (process PID) has died" in first
        assert "rank 1 (process PID) has died" in later
        assert "The group is unusable since 'grad_bucket[7]'." in later


def rank_is_killed_under_a_verb() -> None:
    zcomm.barrier()
    if zcomm.group_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    zcomm.all_reduce(torch.ones(5), label="grad_bucket[7]")


def test_the_verbs_name_the_call_too() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(rank_is_killed_under_a_verb, 2)
    (text,) = (report.text for report in caught.value.reports if report.rank == 0)
    assert "CollectiveFailed: all_reduce 'grad_bucket[7]' of float32[5] on cpu over 2 ranks failed after" in text
    assert "rank 1 (process " in text


def rank_does_not_come() -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    zcomm.barrier()
    reduce(torch.ones(1), group)
    if zcomm.group_rank() == 1:
        compat.default_store().get("waited")  # blocks until the other rank has set it
    text = error_of(torch.ones(10**6), group, label="bucket")
    compat.default_store().set("waited", "1")
    return text


def test_a_rank_that_does_not_come_in_time_is_named_on_all_ranks() -> None:
    early, late = run_ranks(rank_does_not_come, 2)
    assert re.match(r"this rank waited [1-9]\d*\.", early)
    assert "for rank 1 (process " in early
    assert early.endswith("the time limit of the group.")
    assert late.startswith("rank 0 (process ")
    assert late.endswith("for this rank, the time limit of the group.")


def rank_leaves() -> str:
    group = dist.new_group()
    reduce(torch.ones(1), group)
    if zcomm.group_rank() == 1:
        transport(group).close()
        text = error_of(torch.ones(3), group)
    else:
        text = error_of(torch.ones(3), group, label="weights")
    tensor = torch.ones(3)
    reduce(tensor)
    assert tensor.tolist() == [3.0] * 3
    return text


def test_a_rank_that_leaves_the_group_is_named_and_other_groups_live_on() -> None:
    first, second, third = run_ranks(rank_leaves, 3)
    for text in (first, third):
        assert text.startswith("rank 1 (process ")
        assert "has closed the group" in text
    assert second == "this rank has closed the group."


def rank_disagrees(what: str) -> tuple[str, str]:
    odd, group, size = int(zcomm.group_rank() == 1), dist.new_group(), zcomm.group_size()
    reduce(torch.ones(1), group)
    small, large, big = torch.ones(6), torch.ones(6 * size), torch.ones(10**6 + odd)
    length, whole = torch.ones(100 + odd), torch.ones(8, dtype=[torch.float32, torch.int32][odd])
    gather, scatter = Message("all_gather", large, small), Message("reduce_scatter", small, large, "sum")
    strided = Message("reduce_scatter", small, torch.ones(9 * size), "sum", stride=6 + odd)
    barrier = Message("barrier", None, None, label="end")
    message = {
        "length": Message("all_reduce", length, length, "sum", label="a"),
        "dtype": Message("all_reduce", whole, whole, "sum"),
        "reduction": Message("all_reduce", small, small, ["sum", "max"][odd], label="b"),
        "source": Message("broadcast", small, small, source=odd),
        "op": [gather, scatter][odd],
        "stride": strided,
        "barrier": [Message("all_reduce", small, small, "sum", label="c"), barrier][odd],
        "large": Message("all_reduce", big, big, "sum", label="big", overlap=True),
        "label": Message("all_reduce", small, small, "sum", label=f"layer {odd}"),
    }[what]
    with pytest.raises(SharedMemoryFailed) as caught:
        transport(group).issue(message).wait()
    return str(caught.value), error_of(torch.ones(1), group)


DISAGREEMENTS = {
    "length": "rank 0 calls all_reduce 'a' of 100 float32 (op 'sum'), rank 1 all_reduce 'a' of 101 float32",
    "dtype": "rank 0 calls all_reduce of 8 float32 (op 'sum'), rank 1 all_reduce of 8 int32 (op 'sum')",
    "reduction": "all_reduce 'b' of 6 float32 (op 'sum'), rank 1 all_reduce 'b' of 6 float32 (op 'max')",
    "source": "broadcast of 6 float32 (source 0), rank 1 broadcast of 6 float32 (source 1)",
    "op": "rank 0 calls all_gather of 6 float32 a rank, rank 1 reduce_scatter of 6 float32 a rank (op 'sum')",
    "stride": "of 6 float32 a rank (op 'sum'), rank 1 reduce_scatter of 6 float32 a rank (7 apart, op 'sum')",
    "barrier": "float32 (op 'sum'), rank 1 barrier 'end'",
    "label": "all_reduce 'layer 0' of 6 float32 (op 'sum'), rank 1 all_reduce 'layer 1' of 6 float32",
    "large": "of 1000000 float32 (op 'sum'), rank 1 all_reduce 'big' of 1000001 float32",
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_report_both_calls_and_cannot_go_on(what: str, world_size: int) -> None:
    for first, later in run_ranks(rank_disagrees, world_size, what):
        for text in (first, later):
            assert text.startswith("the ranks disagree: ")
            assert DISAGREEMENTS[what] in text
        assert "The group is unusable since" in later


def rank_is_interrupted() -> list[float]:
    """Ctrl-C ends a wait at once, and not the collective."""
    tensor = torch.ones(10)
    zcomm.barrier()
    if zcomm.group_rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            zcomm.all_reduce(tensor)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert tensor.eq(1).all(), "the other rank has not come yet"
    else:
        time.sleep(1.0)
        zcomm.all_reduce(tensor)
    zcomm.barrier()
    return tensor.tolist()


def test_a_wait_can_be_interrupted_and_the_collective_goes_on() -> None:
    assert run_ranks(rank_is_interrupted, 2) == [[2.0] * 10] * 2


def rank_forks() -> int:
    reduce(torch.ones(1))
    shared = zcomm.shared_empty(1000)
    child = os.fork()
    if child == 0:
        try:
            reduce(shared)
        except SharedMemoryFailed as error:
            os._exit(7 if f"was forked from process {os.getppid()}" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)
    shared.fill_(1)
    reduce(shared)
    assert shared.eq(2).all()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_is_rejected_and_its_parent_goes_on() -> None:
    assert run_ranks(rank_forks, 2) == [7, 7]


def rank_forks_and_the_child_cleans_up() -> None:
    reduce(torch.ones(1), overlap=True)
    child = os.fork()
    if child == 0:
        registry.close_all()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    reduce(torch.ones(1))


def test_a_child_that_cleans_up_does_not_close_its_parents_group() -> None:
    run_ranks(rank_forks_and_the_child_cleans_up, 2)


def rank_forks_meanwhile(hosts: str) -> int:
    """The child looks after the handle it has inherited while the parent's collective waits for rank 3."""
    os.environ["ZCOMM_HOST"] = hosts[dist.get_rank()]
    zcomm.barrier()
    tensor, rank = torch.ones(1000), dist.get_rank()
    if rank == 3:
        dist.barrier()
    handle = zcomm.all_reduce(tensor, async_op=True)
    child = os.fork()
    if child == 0:
        is_over = handle.is_done() and handle.wait_for(1000.0)
        try:
            handle.wait()
        except zcomm.CollectiveFailed as error:
            os._exit(7 if is_over and f"was forked from process {os.getppid()}" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)
    if rank != 3:
        dist.barrier()
    handle.wait()
    assert tensor.eq(4).all()
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("hosts", ["AAAA", "AABB"])
def test_a_forked_child_cannot_wait_for_a_handle_of_its_parents(hosts: str) -> None:
    assert run_ranks(rank_forks_meanwhile, 4, hosts)[:3] == [7] * 3
