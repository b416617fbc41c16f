"""A played world: one process takes the part of any rank of any world, and hears of every operation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from zcomm import PlayedCall


@pytest.fixture(autouse=True)
def _without_a_world() -> None:
    """End a world of one that another test has left open."""
    if dist.is_initialized():
        dist.destroy_process_group()


def told(call: PlayedCall) -> tuple[str, int, str, str, str]:
    return call.op, call.nbytes, call.dtype, call.detail, call.label


def test_every_operation_is_announced_and_answered_as_if_all_ranks_sent_the_same() -> None:
    calls: list[PlayedCall] = []
    with zcomm.played_world(17, 1024, listen=calls.append) as world:
        assert (world.rank, world.world_size, zcomm.group_rank(), zcomm.group_size()) == (17, 1024, 17, 1024)
        output, own = torch.empty(2048), torch.tensor([1.0, 2.0])
        zcomm.all_gather(output, own, label="weights")
        assert output.view(1024, 2).eq(own).all()
        zcomm.all_reduce(own, op="max")
        piece = torch.empty(2)
        zcomm.reduce_scatter(piece, output, async_op=True).wait()
        zcomm.broadcast(own, source=3)
        assert zcomm.all_gather_object({"rank": 17}) == [{"rank": 17}] * 1024
        zcomm.barrier()
        dist.all_reduce(own)  # the user's own
        assert own.tolist() == [1.0, 2.0]
    assert not dist.is_initialized()
    assert [told(call) for call in calls] == [
        ("allgather", 8192, "float32", "", "weights"),
        ("allreduce", 8, "float32", "max", ""),
        ("reduce_scatter", 8192, "float32", "sum", ""),
        ("broadcast", 8, "float32", "from 3", ""),
        ("allgather", 8192, "int64", "", "exchange lengths"),
        ("allgather", 12 * 1024, "uint8", "", "exchange values"),
        ("barrier", 0, "", "", ""),
        ("allreduce", 8, "float32", "sum", ""),
    ]
    assert all("test_played.py:" in call.line for call in calls)


def test_groups_have_the_names_that_all_their_ranks_would_give_them() -> None:
    def groups(rank: int) -> list[zcomm.Communicator]:
        calls: list[PlayedCall] = []
        with zcomm.played_world(rank, 8, listen=calls.append):
            if rank < 4:
                zcomm.barrier(zcomm.strided_group(4))  # a group that the others do not have
            run = zcomm.consecutive_group(2)
            zcomm.barrier(run)
            zcomm.duplicate_group(run)
            zcomm.barrier(zcomm.duplicate_host_group(run))
        return [call.communicator for call in calls]

    first, second, far = groups(0), groups(1), groups(6)
    assert first[1:] == second[1:]
    assert [each.ranks for each in first] == [(0, 4), (0, 1), (0, 1), (0, 1), (0, 1)]
    assert [each.number for each in first] == [0, 0, 0, 1, 2]
    assert [each.is_on_host for each in first] == [False] * 4 + [True]
    assert {each.ranks for each in far} == {(6, 7)}


def test_messages_name_their_ends_and_the_answer_may_be_chosen() -> None:
    calls: list[PlayedCall] = []

    def answer(call: PlayedCall, results: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        for result in results:
            result.fill_(5)

    with zcomm.played_world(2, 4, listen=calls.append, answer=answer):
        group, received = zcomm.consecutive_group(2), torch.zeros(3)
        dist.send(torch.ones(3), group=group, group_dst=1)
        dist.recv(received, group=group, group_src=1)
    assert received.tolist() == [5.0] * 3
    assert [(call.op, call.source, call.target, call.communicator.ranks) for call in calls] == [
        ("send", 0, 1, (2, 3)),
        ("recv", 1, 0, (2, 3)),
    ]


def test_messages_of_one_batch_are_one_launch() -> None:
    calls: list[PlayedCall] = []

    def batch(group: dist.ProcessGroup) -> list[dist.P2POp]:
        peer = {"group": group, "group_peer": 1}
        return [dist.P2POp(dist.isend, torch.ones(1), **peer), dist.P2POp(dist.irecv, torch.ones(1), **peer)]

    with zcomm.played_world(2, 4, listen=calls.append):
        group = zcomm.consecutive_group(2)
        for _ in range(2):
            dist.batch_isend_irecv(batch(group))
        zcomm.barrier(group)
        dist.send(torch.ones(1), group=group, group_dst=1)
    assert [call.op for call in calls] == ["send", "recv", "send", "recv", "barrier", "send"]
    assert [call.launch for call in calls] == [1, 1, 2, 2, 3, 4]
    assert all("in test_messages_of_one_batch" in call.line for call in calls)


def test_a_process_in_a_world_cannot_play_another() -> None:
    with zcomm.played_world(0, 2, listen=lambda call: None):
        second = zcomm.played_world(1, 2, listen=lambda call: None)
        with pytest.raises(RuntimeError, match="needs a process without a process group"), second:
            pass
        assert zcomm.init().world_size == 2
    with zcomm.init() as real:
        assert real.world_size == 1
