"""Two-level groups: handles, lifetimes, and failures on every rank of every host."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm.shared import native, network, registry
from zcomm.shared.failure import SharedMemoryFailed
from zcomm.shared.hierarchy import HierarchicalTransport
from zcomm.shared.transport import Message
from zcomm.testing import RankFailed, run_ranks
from zcomm.testing.failure import Ending

pytestmark = pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())

LONG = timedelta(seconds=300)  # the limit of collectives that must fail before: run_ranks waits for a minute


def on_hosts(hosts: str = "AABB") -> None:
    os.environ["ZCOMM_HOST"] = hosts[dist.get_rank()]


def hierarchy(group: dist.ProcessGroup | None = None) -> HierarchicalTransport:
    found = registry.transport_of(group)
    assert isinstance(found, HierarchicalTransport)
    return found


def error_of(*, label: str = "", overlap: bool = False, group: dist.ProcessGroup | None = None) -> str:
    """Error of an all_reduce that must fail, below the verbs."""
    tensor = torch.ones(200_000)
    message = Message("all_reduce", tensor, tensor, "sum", label=label, overlap=overlap)
    with pytest.raises(SharedMemoryFailed) as caught:
        issue_and_wait(message, group)
    return str(caught.value)


def issue_and_wait(message: Message, group: dist.ProcessGroup | None) -> None:
    task = hierarchy(group).issue(message)
    assert task is not None
    task.wait()


def resources() -> tuple[int, int, int]:
    """Open descriptors, threads, and mappings of ours."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("memfd:zcomm")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings


def rank_describes_its_transport() -> list[tuple[str, str]]:
    on_hosts()
    answers = [(zcomm.transport(), zcomm.transport_reason())]
    zcomm.barrier()
    answers.append((zcomm.transport(), zcomm.transport_reason()))
    rank = dist.get_rank()
    for ranks in ([rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2], [0, 1, 2]):
        group = dist.new_group(ranks, use_local_synchronization=True)
        if rank in ranks:
            tensor = torch.ones(3)
            zcomm.all_reduce(tensor, group)
            assert tensor.eq(len(ranks)).all()
            answers.append((zcomm.transport(group), zcomm.transport_reason(group)))
    return answers


def test_a_group_describes_its_two_levels_and_others_their_reason() -> None:
    both = "2 hosts have 2 ranks each: shared memory inside a host, Gloo between hosts; all_to_all over Gloo"
    alone = "each of its 2 ranks is on a host of its own"
    uneven = "its hosts have different numbers of ranks: 2 on that of rank 0, 1 on that of rank 2"
    for rank, answers in enumerate(run_ranks(rank_describes_its_transport, 4)):
        assert answers[:4] == [
            ("none", "not decided yet: the group has not communicated"),
            ("shared memory + gloo", both),
            ("shared memory", "all 2 ranks are on one host"),
            ("gloo", f"{alone}: exchanged over Gloo and added in the order of the ranks"),
        ]
        assert answers[4:] == ([("gloo", uneven)] if rank < 3 else [])


def rank_waits_in_an_order_of_its_own() -> None:
    """Two groups, thirty collectives, each rank issues and waits in an order of its own among the groups."""
    on_hosts()
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        zcomm.barrier(group)
    tensors, handles = {}, {}
    for which in (0, 1) if rank % 2 else (1, 0):
        for index in range(15):
            tensors[which, index] = torch.full((index * 9_000 + 1,), float(rank + index + 100 * which))
            handles[which, index] = zcomm.all_reduce(tensors[which, index], groups[which], async_op=True)
    for key in random.Random(rank).sample(sorted(handles), len(handles)):
        handles[key].wait()
    for (which, index), tensor in tensors.items():
        assert tensor.eq(size * (index + 100 * which) + sum(range(size))).all()
    assert all(handle.is_done() for handle in handles.values())


def rank_overlaps_and_drops() -> None:
    """A handle ends without a wait; dropped ones do no harm; a shared tensor is made in its turn among them."""
    on_hosts()
    size = dist.get_world_size()
    tensor = torch.ones(500_000)
    handle = zcomm.all_reduce(tensor, async_op=True)
    while not handle.is_done():
        torch.ones(10).sum()
    assert tensor.eq(size).all()
    handle.wait()
    for _ in range(10):
        zcomm.all_reduce(torch.ones(100_000), async_op=True)
        zcomm.all_reduce(zcomm.shared_empty(100_000), async_op=True)
    leaf = torch.nn.Parameter(torch.ones(2))
    zcomm.all_reduce(leaf, op="max")
    chained, total, whole = torch.ones(4), torch.empty(1), torch.empty(4)
    first = zcomm.reduce_scatter(total, chained, async_op=True)
    zcomm.all_gather(whole, total)  # reads what the one before it writes
    first.wait()
    assert whole.eq(size).all()


def test_handles_may_be_waited_for_in_any_order_dropped_or_left_to_the_thread() -> None:
    run_ranks(rank_waits_in_an_order_of_its_own, 4)
    run_ranks(rank_overlaps_and_drops, 4)


def issued(kind: str, tensor: torch.Tensor, source: int) -> tuple[zcomm.Handle, torch.Tensor, torch.Tensor]:
    """A collective in which rank r sends `tensor` = r: its handle, where the result will be, and what it is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = tensor.numel() // size
    slices = torch.arange(float(size)).repeat_interleave(part)
    output = torch.empty_like(tensor)
    if kind == "all_reduce":
        return zcomm.all_reduce(tensor, async_op=True), tensor, torch.full_like(tensor, sum(range(size)))
    if kind == "reduce_scatter":
        handle = zcomm.reduce_scatter(output[:part], tensor, async_op=True)
        return handle, output[:part], torch.full_like(output[:part], sum(range(size)))
    if kind == "all_gather":
        return zcomm.all_gather(tensor, tensor[rank * part : (rank + 1) * part], async_op=True), tensor, slices
    if kind == "broadcast":
        return zcomm.broadcast(tensor, source=source, async_op=True), tensor, torch.full_like(tensor, source)
    return zcomm.all_to_all(output, tensor, async_op=True), output, slices


def rank_does_anything(hosts: str, seed: int, times: int) -> None:
    """Collectives of any kind, length and place, up to four under way at once; each is checked."""
    on_hosts(hosts)
    rank, size, choose = dist.get_rank(), dist.get_world_size(), random.Random(seed)  # the same choices on all ranks
    pending: list[tuple[zcomm.Handle, torch.Tensor, torch.Tensor]] = []
    kinds = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
    for _ in range(times):
        length = size * int(10 ** choose.uniform(0, 5.2))
        make = zcomm.shared_empty if choose.random() < 0.3 else torch.empty
        pending.append(issued(choose.choice(kinds), make(length).fill_(rank), choose.randrange(size)))
        if choose.random() < 0.1:
            zcomm.barrier()
        while len(pending) > choose.randrange(4):
            handle, found, expected = pending.pop(choose.randrange(len(pending)))
            handle.wait()
            assert found.equal(expected)
    for handle, found, expected in pending:
        handle.wait()
        assert found.equal(expected)


@pytest.mark.parametrize("hosts", ["AABB", "ABABAB"])
def test_any_sequence_of_collectives_is_right(hosts: str) -> None:
    run_ranks(rank_does_anything, len(hosts), hosts, 1, 40)


def rank_makes_many_groups(times: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    on_hosts("ABAB")
    zcomm.barrier()
    before = (0, 0, 0)
    for index in range(times):
        group = dist.new_group()
        tensor = zcomm.shared_empty(20_000, torch.float32, group)
        zcomm.all_reduce(tensor, group, async_op=True).wait()
        assert zcomm.transport(group) == "shared memory + gloo"
        zcomm.barrier(group)
        dist.destroy_process_group(group)
        del group, tensor
        if index == 4:  # Gloo itself has warmed up
            before = resources()
    for _ in range(100):  # Gloo's own thread closes its sockets when it comes to it
        if all(now <= then for now, then in zip(resources(), before)):
            break
        time.sleep(0.05)
    return before, resources()


def test_fifty_groups_leave_no_descriptor_no_thread_and_no_mapping() -> None:
    for before, after in run_ranks(rank_makes_many_groups, 4, 50):
        assert all(now <= then for now, then in zip(after, before)), (before, after)


def rank_closes_in_the_middle() -> str:
    """Close rank 0 during a collective; no rank waits for the time limit."""
    on_hosts()
    group = dist.new_group(timeout=LONG)
    zcomm.barrier(group)
    if dist.get_rank() == 0:
        tensor = torch.ones(200_000)
        zcomm.all_reduce(tensor, group, async_op=True)
        time.sleep(0.2)
        hierarchy(group).close()
        hierarchy(group).close()
    dist.barrier()
    text = error_of(group=group)
    dist.barrier()
    return text


def test_a_rank_that_leaves_ends_the_waits_of_all() -> None:
    texts = run_ranks(rank_closes_in_the_middle, 4)
    assert texts[0] == "this rank has closed the group."
    assert texts[1].startswith("rank 0 (process ")
    assert texts[1].endswith(" has closed the group.")
    assert texts[2].startswith("between hosts, with rank 0: ")
    assert (
        "has lost its connection to the ranks on other hosts" in texts[3] or "between hosts, with rank 1" in texts[3]
    )


def rank_is_killed(overlap: bool) -> None:
    on_hosts()
    group = dist.new_group(timeout=LONG)
    told_pids = zcomm.all_gather_object(os.getpid())
    zcomm.barrier(group)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    first = error_of(label="grad_bucket[7]", overlap=overlap, group=group)
    later = error_of(label="other", overlap=overlap, group=group)
    registry.close_all()
    left = resources()[2]
    raise AssertionError(f"{first} | {later} | {left} mappings".replace(str(told_pids[3]), "PID"))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_killed_rank_ends_the_waits_on_all_hosts_and_leaves_no_memory(overlap: bool) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(rank_is_killed, 4, overlap)
    reports = {report.rank: report for report in caught.value.reports}
    assert reports[3].ending is Ending.DIED
    assert "rank 3 (process PID) has died" in reports[2].text
    assert "between hosts, with rank 3: " in reports[1].text or "has lost its connection" in reports[1].text
    assert "between hosts, with rank 2: " in reports[0].text or "has lost its connection" in reports[0].text
    for rank in range(3):
        assert "The group is unusable since 'grad_bucket[7]'." in reports[rank].text
        assert "| 0 mappings" in reports[rank].text


def rank_is_killed_under_a_verb() -> None:
    on_hosts()
    zcomm.barrier()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    zcomm.all_reduce(torch.ones(5), label="grad_bucket[7]")


def test_the_verbs_name_the_killed_rank_on_every_host() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(rank_is_killed_under_a_verb, 4)
    texts = {report.rank: report.text for report in caught.value.reports}
    for rank in range(3):
        assert "CollectiveFailed: all_reduce 'grad_bucket[7]' of float32[5] on cpu over 4 ranks failed" in texts[rank]
        assert "Rank 3 is gone: its process has ended" in texts[rank]


def rank_does_not_come() -> str:
    on_hosts()
    group = dist.new_group(timeout=timedelta(seconds=1))
    zcomm.barrier(group)
    if dist.get_rank() == 3:
        time.sleep(2.5)
    return error_of(group=group)


def test_a_rank_that_does_not_come_in_time_ends_the_waits_of_all() -> None:
    texts = run_ranks(rank_does_not_come, 4)
    first = ("for rank 3 (process ", "between hosts, with rank 3")  # either level may time out first
    assert any(sign in text for text in texts[1:3] for sign in first)


def rank_disagrees() -> str:
    on_hosts()
    zcomm.barrier()
    tensor = torch.ones(1000 + (dist.get_rank() == 1))
    with pytest.raises(zcomm.CollectiveFailed) as caught:
        zcomm.all_reduce(tensor, label="a")
    return str(caught.value)


def test_ranks_of_a_host_that_disagree_report_both_calls_and_the_others_the_rank_that_differs() -> None:
    texts = run_ranks(rank_disagrees, 4)
    for text in texts[:2]:
        assert "the ranks disagree: rank 0 calls all_reduce 'a' of 1000 float32 (op 'sum'), rank 1 all_red" in text
    for text in texts:
        assert "Rank 1's collective 2 is all_reduce sum 'a' of float32[1001]" in text


def rank_is_interrupted() -> list[float]:
    """Ctrl-C ends a wait, and not the collective."""
    on_hosts()
    tensor = torch.ones(10)
    zcomm.barrier()
    if dist.get_rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            zcomm.all_reduce(tensor)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert tensor.eq(1).all(), "the other ranks have not come yet"
    dist.barrier()
    if dist.get_rank() != 0:
        zcomm.all_reduce(tensor)
    zcomm.barrier()
    return tensor.tolist()


def rank_forks() -> int:
    on_hosts()
    zcomm.all_reduce(torch.ones(1), async_op=True).wait()
    child = os.fork()
    if child == 0:
        hierarchy().close()
        text = error_of()
        os._exit(7 if f"was forked from process {os.getppid()}" in text else 8)
    _, status = os.waitpid(child, 0)
    tensor = torch.ones(1000)
    zcomm.all_reduce(tensor)
    assert tensor.eq(dist.get_world_size()).all()
    return os.waitstatus_to_exitcode(status)


def test_a_wait_can_be_interrupted_and_a_forked_child_is_rejected() -> None:
    assert run_ranks(rank_is_interrupted, 4) == [[4.0] * 10] * 4
    assert run_ranks(rank_forks, 4) == [7] * 4


def rank_0_cannot_join(how: str) -> tuple[str, str, float]:
    """Make one rank unable to join; its peers on both hosts do not wait for the group's time limit."""
    from zcomm.shared.network import Network
    from zcomm.shared.segment import Offer

    on_hosts()

    def reject(*_: object, **__: object) -> None:
        raise OSError("no memory today") if how == "memory" else RuntimeError("no route to host today")

    if dist.get_rank() == 0:
        setattr(*((Offer, "accept") if how == "memory" else (Network, "open")), reject)
    group = dist.new_group(timeout=timedelta(seconds=300 if how == "memory" else 8))
    tensor = torch.ones(4)
    zcomm.all_reduce(tensor, group)
    return zcomm.transport(group), zcomm.transport_reason(group), tensor[0].item()


def fail() -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("memory", "rank 0: cannot reach the memory of rank 1 (no memory today)"),
        ("network", "rank 0: cannot reach its peers on other hosts (no route to host today)"),
    ],
)
def test_if_one_rank_cannot_join_both_levels_all_use_gloo(how: str, reason: str) -> None:
    try:
        assert run_ranks(rank_0_cannot_join, 4, how) == [("gloo", reason, 4.0)] * 4
    finally:
        with pytest.raises(RankFailed):  # ranks that were broken for good must not be used again
            run_ranks(fail, 4)


def rank_overlaps_long_messages() -> None:
    """Long and short collectives of ranks on hosts of their own, in flight at once and waited for in any order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    on_hosts("ABC")
    zcomm.barrier()
    numel = network.LONG_BYTES // 4 * size  # the slice of a rank is long, too
    checks = {}
    for index in range(24):
        value, whole = float(rank + index), torch.empty(numel if index % 4 else 12)
        part = whole[rank * (whole.numel() // size) : (rank + 1) * (whole.numel() // size)]
        if index % 3 == 0:
            handle = zcomm.all_reduce(whole.fill_(value), async_op=True)
            checks[handle] = whole, torch.full_like(whole, sum(range(size)) + size * index)
        elif index % 3 == 1:
            handle = zcomm.reduce_scatter(part, whole.fill_(value), async_op=True)
            checks[handle] = part, torch.full_like(part, sum(range(size)) + size * index)
        else:
            handle = zcomm.all_gather(whole, part.fill_(value), async_op=True)
            expected = torch.arange(float(size)).repeat_interleave(part.numel()) + index
            checks[handle] = whole, expected
    for handle in random.Random(rank).sample(list(checks), len(checks)):
        handle.wait()
        found, expected = checks[handle]
        assert found.equal(expected)
    assert zcomm.transport() == "gloo"


@pytest.mark.parametrize("world_size", [2, 3])
def test_long_collectives_between_hosts_overlap_and_stay_apart(world_size: int) -> None:
    run_ranks(rank_overlaps_long_messages, world_size)


def rank_loses_a_peer() -> list[str]:
    """Rank 0 leaves the group while rank 1 has long collectives in flight."""
    on_hosts("AB")
    group = dist.new_group(timeout=LONG)
    zcomm.barrier(group)
    texts = []
    if dist.get_rank() == 0:
        dist.barrier()  # once rank 1 has issued all of them: what is issued to a broken group raises at once
        hierarchy(group).close()
    else:
        handles = [zcomm.all_reduce(torch.ones(network.LONG_BYTES), group, async_op=True) for _ in range(4)]
        dist.barrier()
        for wait in (*(handle.wait for handle in handles), lambda: zcomm.barrier(group)):
            with pytest.raises(zcomm.CollectiveFailed) as caught:
                wait()
            texts.append(str(caught.value.__cause__))
    dist.barrier()
    return texts


def test_a_lost_peer_ends_long_collectives_and_the_group() -> None:
    _, texts = run_ranks(rank_loses_a_peer, 2)
    assert len(texts) == 5
    assert any("between hosts, with rank 0" in text for text in texts)
