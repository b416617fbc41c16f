"""Two-level collectives on simulated hosts, against an oracle that adds in the documented order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from zcomm.shared import levels, native, network
from zcomm.shared.host_layout import HostLayout
from zcomm.shared.levels import spans
from zcomm.testing import run_ranks

needs_extension = pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())

REDUCED = ["float32", "bfloat16", "float16", "int32", "int64", "float64", "uint8", "int8"]
MOVED = [*REDUCED, "bool", "int16", "complex64"]
TWO_LEVELS = "shared memory + gloo"


def carrier(hosts: str) -> str:
    """Transport of a group on these hosts."""
    return "gloo" if len(set(hosts)) == len(hosts) else TWO_LEVELS


@pytest.mark.parametrize(
    ("numel", "parts", "most", "expected"),
    [
        (0, 2, 4, []),
        (1, 2, 4, [(0, 1)]),
        (8, 2, 4, [(0, 8)]),
        (21, 2, 4, [(0, 8), (8, 16), (16, 20), (20, 21)]),
        (5, 1, 2, [(0, 2), (2, 4), (4, 5)]),
        (3, 1, 0, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_spans_divide_but_for_a_rest(numel: int, parts: int, most: int, expected: list[tuple[int, int]]) -> None:
    assert spans(numel, parts, most) == expected


@contextmanager
def small_chunks() -> Iterator[None]:
    """Let tensors of a few hundred kilobytes pass in many chunks."""
    small = {"SUMMED_BYTES": 40_000, "MOVED_BYTES": 60_000, "SMALL_BYTES": 8_000, "FEW_BYTES": 10_000}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in small.items():
            patch.setattr(levels, name, size)
        patch.setattr(network, "LONG_BYTES", 9_000)
        yield


def values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Values that rank `rank` sends: small whole numbers, or normal ones of either sign."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_complex:
        return torch.randn(numel, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 30, (numel,), generator=generator).to(dtype)


def placed(content: Tensor, is_shared: bool) -> Tensor:
    """A copy of `content` in memory of its own or in shared memory."""
    return zcomm.shared_empty(content.numel(), content.dtype).copy_(content) if is_shared else content.clone()


def folded(op: str, tensors: list[Tensor]) -> Tensor:
    """In the order of the tensors; 16-bit floats in float32, rounded once."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = tensors[0].to(wide)
    for other in tensors[1:]:
        total = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op](total, other.to(wide))
    return total.to(dtype)


def oracle(op: str, sent: list[Tensor], hosts: str) -> Tensor:
    """The ranks of each host in order, then the hosts in order."""
    return folded(op, [folded(op, [sent[rank] for rank in ranks]) for ranks in HostLayout.of(hosts).hosts])


def rank_reduces(hosts: str, dtype_name: str, ops: list[str]) -> str:
    rank, size, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, dtype_name)
    os.environ["ZCOMM_HOST"] = hosts[rank]
    for numel in (0, 1, 1000, 200_001 // dtype.itemsize):
        for op in ops:
            sent = [values(numel * size, dtype, other) for other in range(size)]
            whole, mine = oracle(op, sent, hosts), slice(rank * numel, (rank + 1) * numel)
            for is_shared in {False, numel > 1}:
                where = (op, numel, is_shared)
                with small_chunks():
                    tensor = placed(sent[rank], is_shared)
                    zcomm.all_reduce(tensor, op=op)
                    assert tensor.equal(whole), where
                    odd = placed(sent[rank][:-1], is_shared)  # does not divide by the ranks of a host
                    zcomm.all_reduce(odd, op=op)
                    assert odd.equal(whole[:-1]), where
                    source, output = placed(sent[rank], is_shared), torch.empty(numel, dtype=dtype)
                    zcomm.reduce_scatter(output, source, op=op)
                    assert output.equal(whole[mine]), where
                    assert source.equal(sent[rank])
                    zcomm.reduce_scatter(source[mine], source, op=op)
                    assert source[mine].equal(whole[mine]), where
    return zcomm.transport()


@needs_extension
@pytest.mark.parametrize("dtype", REDUCED)
def test_reductions_equal_the_oracle_bit_for_bit(dtype: str) -> None:
    ops = ["sum", "max", "min"] if dtype in ("float32", "bfloat16") else ["sum"]
    assert run_ranks(rank_reduces, 4, "AABB", dtype, ops) == [TWO_LEVELS] * 4


@needs_extension
@pytest.mark.parametrize("hosts", ["ABAB", "ABBA", "AABBCC", "AB", "ABC"])
def test_reductions_equal_the_oracle_wherever_the_ranks_are(hosts: str) -> None:
    for dtype in ("float32", "bfloat16"):
        assert run_ranks(rank_reduces, len(hosts), hosts, dtype, ["sum"]) == [carrier(hosts)] * len(hosts)


def rank_moves(hosts: str, dtype_names: list[str]) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["ZCOMM_HOST"] = hosts[rank]
    for dtype_name in dtype_names:
        dtype = getattr(torch, dtype_name)
        for numel in (0, 1, 1000, 200_001 // dtype.itemsize):
            sent = [values(numel * size, dtype, other) for other in range(size)]
            mine = slice(rank * numel, (rank + 1) * numel)
            parts = [each[:numel] for each in sent]
            for is_shared in {False, numel > 1}:
                where = (dtype_name, numel, is_shared)
                with small_chunks():
                    output = placed(torch.zeros(numel * size, dtype=dtype), is_shared)
                    zcomm.all_gather(output, placed(parts[rank], is_shared))
                    assert output.equal(torch.cat(parts)), where
                    output.zero_()[mine] = parts[rank]
                    zcomm.all_gather(output, output[mine])
                    assert output.equal(torch.cat(parts)), where
                    for source in {0, size - 1}:
                        tensor = placed(sent[rank], is_shared)
                        zcomm.broadcast(tensor, source=source)
                        assert tensor.equal(sent[source]), where
                    if dtype_name in REDUCED:  # which Gloo knows: it carries this one
                        zcomm.all_to_all(output, placed(sent[rank], is_shared))
                        assert output.equal(torch.cat([each[mine] for each in sent])), where
    return zcomm.transport()


@needs_extension
@pytest.mark.parametrize("hosts", ["AABB", "ABAB", "AABBCC", "AB", "ABC"])
def test_moves_arrive(hosts: str) -> None:
    dtypes = MOVED if hosts == "AABB" else ["float32", "bool"]
    assert run_ranks(rank_moves, len(hosts), hosts, dtypes) == [carrier(hosts)] * len(hosts)


def rank_compares_ways() -> None:
    """The same bits in one chunk and in many, and in a scatter; another order than on one host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["ZCOMM_HOST"] = "AABB"[rank]
    numel = 600_000
    sent = values(numel * size, torch.float32, rank)
    first, second, output = sent.clone(), sent.clone(), torch.empty(numel)
    zcomm.all_reduce(first)
    with small_chunks():
        zcomm.all_reduce(second)
    zcomm.reduce_scatter(output, sent)
    assert first.equal(second)
    assert output.equal(first[rank * numel : (rank + 1) * numel])
    gathered = torch.empty(numel * size)
    zcomm.all_gather(gathered, output)
    assert gathered.equal(first), "all ranks have the same"


@needs_extension
def test_the_bits_do_not_depend_on_how_a_tensor_is_cut() -> None:
    run_ranks(rank_compares_ways, 4)
