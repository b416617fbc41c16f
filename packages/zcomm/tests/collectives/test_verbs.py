"""Collectives on one, two and four ranks against their definitions."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm.testing import recorded, run_ranks

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 4])
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]


def rank_reduces() -> None:
    rank, size = zcomm.group_rank(), zcomm.group_size()
    for dtype in DTYPES:
        for op, expected in (("sum", sum(range(size))), ("max", size - 1), ("min", 0)):
            tensor = torch.full((2, 3), rank, dtype=dtype)
            assert zcomm.all_reduce(tensor, op=op) is zcomm.DONE
            assert tensor.eq(expected).all(), (dtype, op, tensor)


@WORLDS
def test_all_reduce_leaves_the_reduction_on_every_rank(world_size: int) -> None:
    run_ranks(rank_reduces, world_size)


def rank_scatters_and_gathers() -> None:
    rank, size = zcomm.group_rank(), zcomm.group_size()
    for dtype in DTYPES:
        full = torch.arange(3 * size).to(dtype)  # slice r is [3r, 3r+1, 3r+2]
        mine = slice(3 * rank, 3 * rank + 3)
        output = torch.empty(3, dtype=dtype)
        zcomm.reduce_scatter(output, full.clone())
        assert output.equal(full[mine] * size), (dtype, output)

        in_place = full.clone()
        zcomm.reduce_scatter(in_place[mine], in_place, op="max")
        assert in_place[mine].equal(full[mine])

        gathered = torch.zeros(3 * size, dtype=dtype)
        zcomm.all_gather(gathered, full[mine].clone())
        assert gathered.equal(full)

        in_place = torch.zeros(3 * size, dtype=dtype)
        in_place[mine] = full[mine]
        zcomm.all_gather(in_place, in_place[mine])
        assert in_place.equal(full)


@WORLDS
def test_scatter_and_gather_work_apart_and_in_place(world_size: int) -> None:
    run_ranks(rank_scatters_and_gathers, world_size)


def rank_sends_slices(environ: dict[str, str]) -> list[float]:
    os.environ.update(environ)
    rank, size = zcomm.group_rank(), zcomm.group_size()
    source = torch.tensor([10.0 * rank + other for other in range(size) for _ in range(2)])
    output = torch.empty(2 * size)
    with recorded() as communication:
        zcomm.all_to_all(output, source, async_op=True, label="tokens").wait()
    assert communication.labels == (["tokens"] if size > 1 else [])
    return output[::2].tolist()


@WORLDS
@pytest.mark.parametrize("choice", ["auto", "gloo"])
def test_all_to_all_sends_slice_r_to_rank_r(world_size: int, choice: str) -> None:
    expected = [[10.0 * sender + rank for sender in range(world_size)] for rank in range(world_size)]
    assert run_ranks(rank_sends_slices, world_size, {"ZCOMM_TRANSPORT": choice}) == expected


def rank_broadcasts() -> list[float]:
    rank, size = zcomm.group_rank(), zcomm.group_size()
    tensor = torch.tensor([float(rank)])
    zcomm.broadcast(tensor, source=size - 1)
    return tensor.tolist()


@WORLDS
def test_broadcast_takes_the_source_rank(world_size: int) -> None:
    assert run_ranks(rank_broadcasts, world_size) == [[world_size - 1.0]] * world_size


def rank_broadcasts_in_a_group() -> float:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[dist.get_rank() % 2]
    tensor = torch.tensor([float(dist.get_rank())])
    zcomm.broadcast(tensor, mine, source=1)
    assert zcomm.group_size(mine) == 2
    assert zcomm.group_rank(mine) == dist.get_rank() // 2
    zcomm.barrier(mine, label="end")
    other = groups[1 - dist.get_rank() % 2]
    with pytest.raises(ValueError, match=f"Rank {dist.get_rank()} is not a member of the given group"):
        zcomm.all_reduce(tensor, other)
    return tensor.item()


def test_a_source_is_a_rank_within_the_group_and_non_members_are_rejected() -> None:
    assert run_ranks(rank_broadcasts_in_a_group, 4) == [2.0, 3.0, 2.0, 3.0]


def rank_overlaps() -> list[str]:
    rank, size = zcomm.group_rank(), zcomm.group_size()
    first, second = torch.ones(4), torch.full((2,), float(rank))
    gathered = torch.empty(2 * size)
    with recorded() as communication:
        one = zcomm.all_reduce(first, async_op=True, label="one")
        two = zcomm.all_gather(gathered, second, async_op=True, label="two")
        two.wait()
        one.wait()
    assert one.is_done()
    assert two.is_done()
    one.wait()  # again is nothing
    assert first.tolist() == [float(size)] * 4
    assert gathered.tolist() == [float(r) for r in range(size) for _ in range(2)]
    zcomm.barrier()
    return communication.labels


def test_async_handles_may_be_waited_for_in_any_order_and_twice() -> None:
    assert run_ranks(rank_overlaps, 2) == [["one", "two"]] * 2


def rank_without_torch_distributed() -> None:
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert (zcomm.group_size(), zcomm.group_rank()) == (1, 0)
    tensor, output = torch.arange(4.0), torch.empty(4)
    with recorded() as communication:
        assert zcomm.all_reduce(tensor, async_op=True) is zcomm.DONE
        assert zcomm.broadcast(tensor) is zcomm.DONE
        assert zcomm.reduce_scatter(output, tensor) is zcomm.DONE
        assert output.equal(tensor)
        assert zcomm.all_gather(output.zero_(), tensor, async_op=True) is zcomm.DONE
        assert output.equal(tensor)
        zcomm.all_gather(tensor, tensor)
        zcomm.barrier()
    assert communication.count() == 0


def test_without_torch_distributed_the_world_is_one_rank() -> None:
    """In a process of its own, since engines of other tests start a world in the process of the tests."""
    run_ranks(rank_without_torch_distributed, 1)


def test_the_skip_copies_into_a_leaf_that_requires_grad() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    zcomm.all_gather(leaf, torch.ones(3))
    assert leaf.tolist() == [1.0, 1.0, 1.0]


def strided() -> torch.Tensor:
    return torch.zeros(4, 2).t()


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "an unknown op": (
        lambda: zcomm.all_reduce(torch.zeros(1), op="avg", label="g[3]"),
        ValueError,
        r"all_reduce 'g\[3\]': unknown op 'avg'; allowed: 'sum', 'max', 'min'",
    ),
    "a tensor with gaps": (
        lambda: zcomm.all_reduce(strided(), label="g"),
        ValueError,
        r"all_reduce 'g': tensor of shape \[2, 4\] and strides \[1, 2\] is not contiguous",
    ),
    "a sparse tensor": (
        lambda: zcomm.broadcast(torch.zeros(2).to_sparse()),
        ValueError,
        r"broadcast: tensor is torch.sparse_coo; pass a dense tensor",
    ),
    "no tensor": (lambda: zcomm.all_reduce([1.0]), TypeError, "all_reduce: tensor must be a torch.Tensor, got list"),
    "a matrix to gather": (
        lambda: zcomm.all_gather(torch.zeros(2, 2), torch.zeros(4)),
        ValueError,
        r"all_gather: output must be 1-D, got shape \[2, 2\]",
    ),
    "a wrong length to scatter": (
        lambda: zcomm.reduce_scatter(torch.zeros(3), torch.zeros(7), label="b"),
        ValueError,
        r"reduce_scatter 'b': input has 7 elements, output has 3; over 1 ranks input must have 3 x 1 = 3 elements",
    ),
    "a wrong length to gather": (
        lambda: zcomm.all_gather(torch.zeros(7), torch.zeros(3)),
        ValueError,
        r"all_gather: output has 7 elements, input has 3; over 1 ranks output must have 3 x 1 = 3 elements",
    ),
    "different lengths to exchange": (
        lambda: zcomm.all_to_all(torch.zeros(6), torch.zeros(4), label="tokens"),
        ValueError,
        r"all_to_all 'tokens': output has 6 elements, input has 4; both must have the same number, a multiple of 1",
    ),
    "memory that overlaps": (
        lambda: zcomm.all_to_all(*[torch.zeros(8)] * 2),
        ValueError,
        "all_to_all: output overlaps input at byte 0; pass memory of its own",
    ),
    "two dtypes": (
        lambda: zcomm.all_gather(torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)),
        ValueError,
        r"all_gather: output has dtype torch.float32, input torch.bfloat16; they must agree",
    ),
    "two devices": (
        lambda: zcomm.all_gather(torch.zeros(3), torch.zeros(3, device="meta")),
        ValueError,
        r"all_gather: output has device cpu, input meta; they must agree",
    ),
    "no such source": (
        lambda: zcomm.broadcast(torch.zeros(1), source=1),
        ValueError,
        r"broadcast: source 1 is not a rank of the group; allowed: 0 to 0",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_shows_at_world_size_1_too_and_names_the_call(mistake: str) -> None:
    call, kind, message = WRONG[mistake]
    with pytest.raises(kind, match=message):
        call()


def rank_overlaps_memory() -> None:
    rank, buffer = zcomm.group_rank(), torch.zeros(8)
    wrong = 1 - rank
    with pytest.raises(ValueError, match=rf"overlaps the larger at byte {16 * wrong}; only slice {rank} .*own"):
        zcomm.reduce_scatter(buffer[4 * wrong : 4 * wrong + 4], buffer)
    with pytest.raises(ValueError, match="overlaps the larger at byte 4"):
        zcomm.all_gather(buffer, buffer[1:5])


def test_only_the_own_slice_may_share_memory() -> None:
    run_ranks(rank_overlaps_memory, 2)


def rank_moves_an_odd_dtype() -> None:
    with pytest.raises(ValueError, match=r"all_reduce 'odd' of int16\[2\] on cpu over 2 ranks: .*this dtype"):
        zcomm.all_reduce(torch.zeros(2, dtype=torch.int16), label="odd")


def test_a_dtype_that_the_back_end_cannot_reduce_is_named() -> None:
    run_ranks(rank_moves_an_odd_dtype, 2)


def rank_moves_nothing() -> None:
    zcomm.all_reduce(torch.empty(0))
    zcomm.reduce_scatter(torch.empty(0), torch.empty(0))
    zcomm.all_gather(torch.empty(0), torch.empty(0))
    scalar = torch.tensor(1.0)
    zcomm.all_reduce(scalar)
    assert scalar.item() == zcomm.group_size()


@WORLDS
def test_empty_tensors_and_scalars_work(world_size: int) -> None:
    run_ranks(rank_moves_nothing, world_size)


def rank_loses_its_peer() -> str:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(zcomm.CollectiveFailed) as caught:
        zcomm.all_reduce(torch.zeros(4), label="grad_bucket[0]")
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_a_lost_peer_is_a_named_error_with_the_label() -> None:
    message, _ = run_ranks(rank_loses_its_peer, 2)
    assert message.startswith("all_reduce 'grad_bucket[0]' of float32[4] on cpu over 2 ranks failed after ")
    assert "look at the other ranks first" in message


def rank_waits_for_a_while(environ: dict[str, str]) -> list[bool]:
    os.environ.update(environ)
    twin, tensor, found = zcomm.duplicate_group(), torch.ones(1000), []
    if zcomm.group_rank() == 0:
        handle = zcomm.all_reduce(tensor, async_op=True)
        found.append(handle.wait_for(0.01))
    zcomm.barrier(twin)
    if zcomm.group_rank() == 1:
        handle = zcomm.all_reduce(tensor, async_op=True)
    found.append(handle.wait_for(20.0))
    handle.wait()
    return [*found, bool((tensor == 2).all())]


@pytest.mark.parametrize("choice", ["auto", "gloo"])
def test_a_rank_can_wait_for_a_while(choice: str) -> None:
    found = run_ranks(rank_waits_for_a_while, 2, {"ZCOMM_TRANSPORT": choice})
    assert found == [[False, True, True], [True, True]]
