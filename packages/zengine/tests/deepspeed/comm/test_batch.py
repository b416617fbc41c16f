"""Messages started as one batch, the back end as an object, and ranks by the launcher's environment."""

from __future__ import annotations

import pytest
import torch

import zengine.deepspeed.comm as dist
from zcomm.testing import run_ranks
from zengine.deepspeed.comm import comm, utils
from zengine.deepspeed.comm.torch import TorchBackend
from zengine.deepspeed.utils import groups


def check_batch() -> tuple[object, ...]:
    rank = dist.get_rank()
    sent, received = torch.full((4,), float(rank)), torch.empty(4)
    batch = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for handle in dist.batch_isend_irecv(batch):
        handle.wait()
    with pytest.raises(AssertionError, match="op must be deepspeed"):
        dist.P2POp(torch.distributed.isend, sent, 0)
    backend: TorchBackend = comm.cdb
    summed = torch.ones(2)
    backend.all_reduce(summed)
    backend.barrier(async_op=True).wait()
    pair = backend.new_group([0, 1])
    return (
        received.tolist(),
        summed.tolist(),
        (backend.name, backend.get_backend(), backend.get_rank(), backend.world_size),
        backend.get_global_rank(pair, 1),
        backend.is_initialized(),
    )


def test_a_batch_crosses_and_the_back_end_is_an_object():
    for rank, (received, summed, who, other, is_up) in enumerate(run_ranks(check_batch, 2)):
        assert received == [1.0 - rank] * 4
        assert (summed, who, other, is_up) == ([2.0, 2.0], ("torch", "gloo", rank, 2), 1, True)


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert utils.get_world_size_from_launcher() == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    assert (utils.get_world_rank_from_launcher(), utils.get_local_rank_from_launcher()) == (5, 0)
    monkeypatch.setenv("RANK", "3")
    assert utils.get_world_rank_from_launcher() == 3


def test_sizes_of_messages_are_those_of_the_sent_tensors():
    assert utils.get_msg_size_from_args(dist.all_reduce, torch.ones(3)) == 12
    assert utils.get_msg_size_from_args(dist.all_gather, [], tensor=torch.ones(3)) == 12
    assert utils.get_msg_size_from_args(dist.reduce_scatter, torch.ones(3), [torch.ones(3), torch.ones(3)]) == 24
    assert utils.get_msg_size_from_args(dist.barrier) == 0


def test_ranks_of_experts_are_deepspeeds():
    """Values of DeepSpeed 0.19.8."""
    expert, data = groups._get_expert_parallel_ranks(16, 2, 4)
    assert expert == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]
    assert data == [[0, 8], [2, 10], [4, 12], [6, 14], [1, 9], [3, 11], [5, 13], [7, 15]]
    expert, data = groups._get_expert_parallel_ranks(16, 1, 4, 2)
    assert (expert[2], data[4:]) == ([8, 9, 10, 11], [[8, 12], [9, 13], [10, 14], [11, 15]])
    expert, data = groups._get_expert_parallel_ranks(32, 2, 4, 2, use_data_before_expert_parallel_=True)
    assert expert[:3] == [[0, 4, 8, 12], [2, 6, 10, 14], [1, 5, 9, 13]]
    assert data[:2] == [[0, 2], [4, 6]]
    with pytest.raises(AssertionError, match="8 is not divisible by 3"):
        groups._get_expert_parallel_ranks(8, 1, 3)


def check_groups() -> tuple[object, ...]:
    data, model = groups._create_model_parallel(2)
    return (
        data is None or data.size(),
        dist.get_all_ranks_from_group(model),
        groups._get_data_parallel_group_ranks(),
        groups._get_broadcast_src_rank(),
        groups._get_max_expert_size_name(),
        groups._get_expert_parallel_src_rank("ep_size_1"),
    )


def test_groups_are_made_and_their_ranks_told():
    for rank, found in enumerate(run_ranks(check_groups, 2)):
        assert found[1:] == ([0, 1], [0, 1], 0, "ep_size_1", rank)
