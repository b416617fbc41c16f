"""Every collective through shared memory: against an oracle, against Gloo, and its ways against each other."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zcomm.shared import native, registry
from zcomm.shared.transport import Message, Transport
from zcomm.testing import run_ranks

pytestmark = pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())

REDUCED = ["float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "int8"]
MOVED = [*REDUCED, "bool", "int16", "complex64"]
PLACES = ["own", "shared", "mixed"]  # where the tensors lie: nowhere special, in shared memory, on even ranks there
ROUNDING = {"float32": 3e-7, "float64": 1e-15, "bfloat16": 1e-2, "float16": 2e-3}  # relative, of a sum of few


def sizes(dtype: torch.dtype) -> list[int]:
    """Elements of one rank's slice; the last is odd, of 3 MiB over all ranks, and passes in chunks."""
    return [0, 1, 7, 1000, 3 * 2**20 // dtype.itemsize // zcomm.group_size() | 1]


@contextmanager
def transport_is(choice: str) -> Iterator[None]:
    before = os.environ.get("ZCOMM_TRANSPORT")
    os.environ["ZCOMM_TRANSPORT"] = choice
    try:
        yield
    finally:
        os.environ.pop("ZCOMM_TRANSPORT")
        if before is not None:
            os.environ["ZCOMM_TRANSPORT"] = before


def gloo_group() -> ProcessGroup:
    """All ranks again, over Gloo."""
    group = dist.new_group()
    with transport_is("gloo"):
        zcomm.barrier(group)
    assert zcomm.transport(group) == "gloo"
    return group


def values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Values that rank `rank` sends: small whole numbers, or normal ones of either sign."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_complex:
        return torch.randn(numel, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 30, (numel,), generator=generator).to(dtype)


def placed(content: Tensor, place: str) -> Tensor:
    """A copy of `content` in memory of the kind `place`."""
    if place == "own":
        return content.clone()
    shared = zcomm.shared_empty(content.numel(), content.dtype)
    own = content.clone()
    return shared.copy_(content) if place == "shared" or zcomm.group_rank() % 2 == 0 else own


def oracle(dtype: torch.dtype, op: str, sent: list[Tensor]) -> Tensor:
    """The reduction in the order of the ranks; 16-bit floats in float32, rounded once."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = sent[0].to(wide)
    for other in sent[1:]:
        fold = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
        total = fold(total, other.to(wide))
    return total.to(dtype)


def rank_reduces(dtype_name: str) -> None:
    rank, size, dtype = zcomm.group_rank(), zcomm.group_size(), getattr(torch, dtype_name)
    gloo = gloo_group() if size > 1 else None
    for numel in sizes(dtype):
        for op in ("sum", "max", "min"):
            sent = [values(numel * size, dtype, other) for other in range(size)]
            whole, mine = oracle(dtype, op, sent), slice(rank * numel, (rank + 1) * numel)
            for place in PLACES:
                tensor = placed(sent[rank], place)
                zcomm.all_reduce(tensor, op=op)
                assert tensor.equal(whole), (op, numel, place)
                source, output = placed(sent[rank], place), torch.empty(numel, dtype=dtype)
                zcomm.reduce_scatter(output, source, op=op)
                assert output.equal(whole[mine]), (op, numel, place)
                assert source.equal(sent[rank])
                zcomm.reduce_scatter(source[mine], source, op=op)
                assert source[mine].equal(whole[mine]), (op, numel, place)
            if op == "sum" and dtype.is_floating_point:
                exact = torch.stack([each.double() for each in sent])
                limit = ROUNDING[dtype_name] * exact.abs().sum(0)
                assert (whole.double() - exact.sum(0)).abs().le(limit).all()
                tensor = sent[rank].clone()
                zcomm.all_reduce(tensor, gloo)
                assert (tensor.double() - whole.double()).abs().le(2 * limit).all()
    assert zcomm.transport() == ("shared memory" if size > 1 else "none")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", REDUCED)
def test_reductions_equal_the_oracle_bit_for_bit_wherever_the_tensors_lie(dtype: str, world_size: int) -> None:
    run_ranks(rank_reduces, world_size, dtype)


def rank_moves(dtype_name: str) -> None:
    rank, size, dtype = zcomm.group_rank(), zcomm.group_size(), getattr(torch, dtype_name)
    for numel in sizes(dtype):
        sent = [values(numel * size, dtype, other) for other in range(size)]
        mine = slice(rank * numel, (rank + 1) * numel)
        parts = [each[:numel] for each in sent]
        for place in PLACES:
            output = placed(torch.zeros(numel * size, dtype=dtype), place)
            zcomm.all_gather(output, placed(parts[rank], place))
            assert output.equal(torch.cat(parts)), (numel, place)
            zcomm.all_gather(output.zero_(), parts[rank].clone())
            assert output.equal(torch.cat(parts)), (numel, place)
            output.zero_()[mine] = parts[rank]
            zcomm.all_gather(output, output[mine])
            assert output.equal(torch.cat(parts)), (numel, place)
            for source in {0, size - 1}:
                tensor = placed(sent[rank], place)
                zcomm.broadcast(tensor, source=source)
                assert tensor.equal(sent[source]), (numel, place)
            zcomm.all_to_all(output, placed(sent[rank], place))
            assert output.equal(torch.cat([each[mine] for each in sent])), (numel, place)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", MOVED)
def test_moves_arrive_wherever_the_tensors_lie(dtype: str, world_size: int) -> None:
    run_ranks(rank_moves, world_size, dtype)


def rank_reduces_bool() -> tuple[list[bool], list[bool], list[bool]]:
    results = []
    for op in ("sum", "max", "min"):
        tensor = torch.tensor([False, True, zcomm.group_rank() == 1])
        zcomm.all_reduce(tensor, op=op)
        assert tensor.view(torch.uint8).le(1).all()
        results.append(tensor.tolist())
    return tuple(results)  # type: ignore[return-value]


def test_a_sum_of_bool_is_or() -> None:
    either, both = [False, True, True], [False, True, False]
    assert run_ranks(rank_reduces_bool, 2) == [(either, either, both)] * 2


def rank_reduces_views() -> None:
    rank, size = zcomm.group_rank(), zcomm.group_size()
    flat = zcomm.shared_empty(100_003)
    for start, stop in ((1, 70_002), (0, 100_003), (50_000, 100_003), (5, 6)):
        sent = [values(stop - start, torch.float32, other) for other in range(size)]
        flat[start:stop] = sent[rank]
        zcomm.all_reduce(flat[start:stop])
        assert flat[start:stop].equal(oracle(torch.float32, "sum", sent))


@pytest.mark.parametrize("world_size", [2, 3])
def test_views_of_a_shared_tensor_are_reduced_in_place_at_any_offset(world_size: int) -> None:
    run_ranks(rank_reduces_views, world_size)


def rank_overlaps_groups(order: list[int]) -> None:
    """20 collectives over two groups; each rank issues and waits in an order of its own among the groups."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        zcomm.barrier(group)
    turn = order if rank % 2 else order[::-1]
    tensors, handles = {}, {}
    for which in turn:
        for index in range(10):
            tensors[which, index] = torch.full((index * 40_000 + 1,), float(rank + index + 100 * which))
            handles[which, index] = zcomm.all_reduce(tensors[which, index], groups[which], async_op=True)
    for key in sorted(handles, key=lambda pair: hash((pair, rank))):
        handles[key].wait()
    for (which, index), tensor in tensors.items():
        assert tensor.eq(size * (index + 100 * which) + sum(range(size))).all()
    assert all(handle.is_done() for handle in handles.values())


@pytest.mark.parametrize("world_size", [2, 4])
def test_two_groups_may_be_used_in_any_interleaving(world_size: int) -> None:
    run_ranks(rank_overlaps_groups, world_size, [0, 1])


def rank_computes_meanwhile() -> bool:
    """Nobody waits, and yet it is done: the group's thread carries it out."""
    tensor = torch.ones(1_000_000)
    handle = zcomm.all_reduce(tensor, async_op=True)
    while not handle.is_done():
        torch.ones(10).sum()
    assert tensor.eq(zcomm.group_size()).all()
    handle.wait()
    return True


def test_an_asynchronous_collective_ends_without_a_wait() -> None:
    assert all(run_ranks(rank_computes_meanwhile, 2))


class SlowLibrary:
    """In place of the one in C: nothing is ever over."""

    def __init__(self) -> None:
        self.lib, self.asked_ms = self, list[int]()

    def zs_wait(self, _group: object, _ticket: int, limit_ms: int) -> int:
        self.asked_ms.append(limit_ms)
        time.sleep(limit_ms * 1e-3)
        return 0


def rank_helps(seconds: float) -> int:
    zcomm.barrier()
    found = registry.transport_of(None)
    assert isinstance(found, Transport)
    library = found.library
    slow: Any = SlowLibrary()
    found.library = slow
    try:
        assert not found.help_for(1, seconds)
    finally:
        found.library = library
    return sum(slow.asked_ms)


def test_help_ends_at_its_time_limit() -> None:
    assert run_ranks(rank_helps, 2, 0.0) == [1, 1]
    assert all(asked_ms <= 151 for asked_ms in run_ranks(rank_helps, 2, 0.15))


def rank_drops_the_handle() -> None:
    """The tensors of a collective whose handle is dropped are kept until it is done."""
    for _ in range(20):
        zcomm.all_reduce(torch.ones(300_000), async_op=True)
        zcomm.all_reduce(zcomm.shared_empty(300_000), async_op=True)
    tensor = torch.ones(1)
    zcomm.all_reduce(tensor)
    assert tensor.item() == zcomm.group_size()


def test_a_dropped_handle_does_no_harm() -> None:
    run_ranks(rank_drops_the_handle, 2)


def issued(
    kind: str, first: Tensor, second: Tensor, sent: list[Tensor], source: int
) -> tuple[zcomm.Handle, Tensor, Tensor]:
    """A collective from `first`, where `sent[rank]` lies: its handle, where the result will be, and what it is."""
    rank, part = zcomm.group_rank(), first.numel() // len(sent)
    mine, whole = slice(rank * part, (rank + 1) * part), oracle(torch.float32, "sum", sent)
    if kind == "all_reduce":
        return zcomm.all_reduce(first, async_op=True), first, whole
    if kind == "reduce_scatter":
        return zcomm.reduce_scatter(second[:part], first, async_op=True), second[:part], whole[mine]
    if kind == "all_gather":
        parts = [each[place * part : (place + 1) * part] for place, each in enumerate(sent)]
        return zcomm.all_gather(second, first[mine], async_op=True), second, torch.cat(parts)
    if kind == "broadcast":
        return zcomm.broadcast(first, source=source, async_op=True), first, sent[source]
    return zcomm.all_to_all(second, first, async_op=True), second, torch.cat([each[mine] for each in sent])


def rank_does_anything(seed: int) -> None:
    """A hundred collectives of any kind, length and place, up to four under way at once; each is checked."""
    rank, size, choose = zcomm.group_rank(), zcomm.group_size(), random.Random(seed)  # the same choices on all ranks
    pool = [zcomm.shared_empty(400_000) for _ in range(2)]
    pending: list[tuple[zcomm.Handle, Tensor, Tensor]] = []

    def finish_one() -> None:
        handle, found, expected = pending.pop(choose.randrange(len(pending)))
        handle.wait()
        assert found.equal(expected)

    for _ in range(100):
        length = size * int(10 ** choose.uniform(0, 4.8))
        sent = [values(length, torch.float32, choose.randrange(99)) for _ in range(size)]
        is_shared = choose.random() < 0.5
        while len(pending) > choose.randrange(4) or (is_shared and pending):  # the pool is used by one at a time
            finish_one()
        first, second = (each[:length] for each in pool) if is_shared else torch.empty(2, length)
        first.copy_(sent[rank])
        kind = choose.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"])
        pending.append(issued(kind, first, second, sent, choose.randrange(size)))
        if choose.random() < 0.1:
            zcomm.barrier()
    while pending:
        finish_one()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_collectives_is_right(seed: int, world_size: int) -> None:
    run_ranks(rank_does_anything, world_size, seed)


def rank_sends_a_leaf() -> float:
    leaf = torch.nn.Parameter(torch.ones(4))
    zcomm.all_reduce(leaf)
    return leaf.detach().sum().item()


def test_a_leaf_that_requires_grad_is_reduced() -> None:
    assert run_ranks(rank_sends_a_leaf, 2) == [8.0, 8.0]


def rank_mixes_places(numel: int) -> None:
    rank, size = zcomm.group_rank(), zcomm.group_size()
    sent = [values(numel * size, torch.float32, other) for other in range(size)]
    total = oracle(torch.float32, "sum", sent)
    mine = slice(rank * numel, (rank + 1) * numel)
    gathered = torch.cat([each[:numel] for each in sent])
    exchanged = torch.cat([each[mine] for each in sent])
    for from_place in PLACES:
        for to_place in PLACES:
            where = (numel, from_place, to_place)
            output = placed(torch.zeros(numel * size), to_place)
            zcomm.all_gather(output, placed(sent[rank][:numel], from_place))
            assert output.equal(gathered), where
            output.zero_()
            zcomm.all_to_all(output, placed(sent[rank], from_place))
            assert output.equal(exchanged), where
            output = placed(torch.zeros(numel), to_place)
            zcomm.reduce_scatter(output, placed(sent[rank], from_place))
            assert output.equal(total[mine]), where


@pytest.mark.parametrize("numel", [1000, 6144, 65536, 400_001])
@pytest.mark.parametrize("world_size", [2, 4])
def test_input_and_output_may_lie_in_different_places(world_size: int, numel: int) -> None:
    run_ranks(rank_mixes_places, world_size, numel)


def rank_uses_slices_that_do_not_adjoin(numel: int) -> None:
    rank, size, transport = zcomm.group_rank(), zcomm.group_size(), registry.transport_of(None)
    assert transport is not None
    stride = 2 * numel + 3
    length = (size - 1) * stride + numel
    sent = [values(length, torch.float32, other) for other in range(size)]
    slices = [slice(place * stride, place * stride + numel) for place in range(size)]
    total = oracle(torch.float32, "sum", sent)
    for place in PLACES:
        source, output = placed(sent[rank], place), placed(torch.zeros(numel), place)
        transport.issue(Message("reduce_scatter", output, source, "sum", stride=stride)).wait()
        assert output.equal(total[slices[rank]]), place
        assert source.equal(sent[rank])
        gathered, expected = placed(sent[rank], place), sent[rank].clone()
        for each, other in zip(slices, sent):
            expected[each] = other[each]
        own = gathered[slices[rank]] if place != "mixed" else gathered[slices[rank]].clone()
        transport.issue(Message("all_gather", gathered, own, stride=stride)).wait()
        assert gathered.equal(expected), "the slices are gathered, and what lies between them is untouched"


@pytest.mark.parametrize("numel", [1000, 400_001])
@pytest.mark.parametrize("world_size", [2, 3])
def test_slices_need_not_adjoin(world_size: int, numel: int) -> None:
    run_ranks(rank_uses_slices_that_do_not_adjoin, world_size, numel)
