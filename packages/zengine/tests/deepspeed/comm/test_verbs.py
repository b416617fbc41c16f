"""Every collective of deepspeed.comm on two ranks, against what it is meant to be."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import zengine.deepspeed.comm as dist
from zcomm.testing import run_ranks


def check_all() -> dict[str, object]:
    rank, seen = dist.get_rank(), {}
    one = torch.full((2, 2), float(rank + 1))

    def reduced(**options: object) -> list[float]:
        tensor = one.clone()
        handle = dist.all_reduce(tensor, **options)
        if handle is not None:
            handle.wait()
        return tensor.flatten().unique().tolist()

    seen["sum"] = reduced()
    seen["max, later"] = reduced(op=dist.ReduceOp.MAX, async_op=True)
    seen["avg"] = reduced(op=dist.ReduceOp.AVG)
    seen["product"] = reduced(op=dist.ReduceOp.PRODUCT)
    strided = torch.full((2, 4), float(rank))[:, ::2]
    dist.all_reduce(strided)
    seen["strided"] = strided.flatten().unique().tolist()
    several = [torch.full((2,), float(rank)), torch.full((1, 3), 1.0)]
    dist.all_reduce_coalesced(several)
    seen["coalesced"] = [tensor.flatten().unique().tolist() for tensor in several]
    part = torch.empty(1, 2)
    dist.reduce_scatter_tensor(part, one)
    seen["scatter"], seen["kept"] = part.tolist(), one.flatten().unique().tolist()
    dist.reduce_scatter(part, [one[:1].clone(), one[1:].clone()])
    seen["scatter list"] = part.tolist()
    whole = torch.empty(4, 2)
    dist.all_gather_into_tensor(whole, one)
    seen["gather"] = whole[:, 0].tolist()
    outs = [torch.empty(2, 2), torch.empty(2, 2)]
    dist.all_gather(outs, one)
    seen["gather list"] = [out[0, 0].item() for out in outs]
    pairs = [torch.empty(4), torch.empty(2, 1)]
    dist.all_gather_coalesced(pairs, [one[0].contiguous(), torch.tensor([[10.0 * rank]])])
    seen["gather coalesced"] = [pair.flatten().tolist() for pair in pairs]
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    seen["objects"] = objects
    sent = one.clone()
    dist.broadcast(sent, src=1)
    seen["broadcast"] = sent[0, 0].item()
    words = [f"of rank {rank}"]
    dist.broadcast_object_list(words, src=1)
    seen["words"] = words
    return seen


def check_rest() -> dict[str, object]:
    rank, seen = dist.get_rank(), {}
    one = torch.full((2,), float(rank + 1))
    total = one.clone()
    dist.reduce(total, dst=1)
    seen["reduce"] = total.tolist() if rank == 1 else None
    got = [torch.empty(2), torch.empty(2)] if rank == 0 else None
    dist.gather(one, got, dst=0)
    seen["gather"] = None if got is None else [tensor[0].item() for tensor in got]
    mine = torch.empty(2)
    dist.scatter(mine, [torch.zeros(2), torch.ones(2)] if rank == 0 else None, src=0)
    seen["scatter"] = mine.tolist()
    received = torch.empty(2)
    dist.all_to_all_single(received, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
    seen["all to all"] = received.tolist()
    lists = [torch.empty(1), torch.empty(1)]
    dist.all_to_all(lists, [torch.tensor([rank + 0.0]), torch.tensor([rank + 5.0])])
    seen["all to all list"] = [tensor.item() for tensor in lists]
    if rank == 0:
        dist.send(torch.tensor([3.0]), dst=1)
        dist.isend(torch.tensor([4.0]), dst=1).wait()
    else:
        first, second = torch.empty(1), torch.empty(1)
        seen["sender"] = dist.recv(first, src=0)
        dist.irecv(second, src=0).wait()
        seen["received"] = [first.item(), second.item()]
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    tensor = one.clone()
    dist.inference_all_reduce(tensor)
    seen["inference"] = tensor.tolist()
    with pytest.raises(TypeError, match="is not JSON"):
        dist.all_gather_object([None, None], {1, 2})
    dist.barrier(async_op=True).wait()
    return seen


def test_arguments_of_a_logger_are_taken_everywhere_and_misspelt_ones_nowhere():
    for verb in (dist.reduce, dist.broadcast, dist.barrier):
        with pytest.raises(TypeError, match=r"unknown keyword asynch_op=: did you mean async_op=\?"):
            verb(asynch_op=True)
    dist.barrier(prof=False, log_name="end", debug=2)


def test_reductions_gathers_and_broadcasts_on_two_ranks():
    first, second = run_ranks(check_all, 2)
    assert first["sum"] == [3.0]
    assert first["max, later"] == [2.0]
    assert first["avg"] == [1.5]
    assert first["product"] == [2.0]
    assert first["strided"] == [1.0]
    assert first["coalesced"] == [[1.0], [2.0]]
    assert (first["scatter"], second["scatter"]) == ([[3.0, 3.0]], [[3.0, 3.0]])
    assert (first["kept"], second["kept"]) == ([1.0], [2.0])
    assert first["scatter list"] == [[3.0, 3.0]]
    assert first["gather"] == [1.0, 1.0, 2.0, 2.0]
    assert first["gather list"] == [1.0, 2.0]
    assert first["gather coalesced"] == [[1.0, 1.0, 2.0, 2.0], [0.0, 10.0]]
    assert second["objects"] == [{"rank": 0}, {"rank": 1}]
    assert (first["broadcast"], first["words"]) == (2.0, ["of rank 1"])


def test_the_other_verbs_on_two_ranks():
    first, second = run_ranks(check_rest, 2)
    assert second["reduce"] == [3.0, 3.0]
    assert first["gather"] == [1.0, 2.0]
    assert (first["scatter"], second["scatter"]) == ([0.0, 0.0], [1.0, 1.0])
    assert (first["all to all"], second["all to all"]) == ([0.0, 10.0], [1.0, 11.0])
    assert (first["all to all list"], second["all to all list"]) == ([0.0, 1.0], [5.0, 6.0])
    assert (second["sender"], second["received"]) == (0, [3.0, 4.0])
    assert first["inference"] == [3.0, 3.0]
