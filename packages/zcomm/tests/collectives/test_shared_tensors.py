"""Tensors in shared memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

import zcomm
from zcomm.shared import native
from zcomm.shared.segment import Segment
from zcomm.testing import run_ranks

needs_extension = pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())


def num_mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:zcomm")


def test_in_a_world_of_one_it_is_an_ordinary_tensor_of_zeros() -> None:
    tensor = zcomm.shared_empty(5, torch.bfloat16)
    assert tensor.equal(torch.zeros(5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"shared_empty: numel is -1; it must be 0 or more"):
        zcomm.shared_empty(-1)


def rank_makes_some() -> list[int]:
    zcomm.barrier()
    counts = [num_mappings()]
    tensors = [zcomm.shared_empty(n, dtype) for n in (0, 1, 100_000) for dtype in (torch.float32, torch.int8)]
    assert all(tensor.eq(0).all() and tensor.is_contiguous() and tensor.dim() == 1 for tensor in tensors)
    assert [tensor.numel() for tensor in tensors] == [0, 0, 1, 1, 100_000, 100_000]
    counts.append(num_mappings())
    view = tensors[4][5:10]
    del tensors
    counts.append(num_mappings())
    view.fill_(zcomm.group_rank() + 1)
    zcomm.all_reduce(view)
    assert view.tolist() == [3.0] * 5
    del view
    counts.append(num_mappings())
    return counts


@needs_extension
def test_the_memory_lives_as_long_as_the_tensor_or_a_view() -> None:
    assert run_ranks(rank_makes_some, 2) == [[2, 10, 4, 2]] * 2


def rank_asks_for_something_else() -> str:
    with pytest.raises(zcomm.CollectiveFailed) as caught:
        zcomm.shared_empty(10 + zcomm.group_rank(), torch.float32)
    return str(caught.value)


@needs_extension
def test_ranks_with_different_arguments_raise() -> None:
    for text in run_ranks(rank_asks_for_something_else, 2):
        assert "rank 0 asks for 10 of torch.float32, rank 1 for 11 of torch.float32" in text


def rank_asks_for_what_no_other_host_does(numels: tuple[int, int]) -> str:
    rank = zcomm.group_rank()
    os.environ["ZCOMM_HOST"] = "AABB"[rank]
    with pytest.raises(zcomm.CollectiveFailed) as caught:
        zcomm.shared_empty(numels[rank // 2], torch.int8)
    total = zcomm.shared_empty(10).fill_(1)
    zcomm.all_reduce(total)
    assert total.eq(4).all(), "the group can be used"
    return str(caught.value)


@needs_extension
@pytest.mark.parametrize("numels", [(10, 20), (10, 0)])
def test_hosts_with_different_arguments_raise(numels: tuple[int, int]) -> None:
    for text in run_ranks(rank_asks_for_what_no_other_host_does, 4, numels):
        assert f"rank 0 asks for 10 of torch.int8, rank 2 for {numels[1]} of torch.int8" in text


def rank_has_no_memory() -> tuple[int, float]:
    zcomm.barrier()
    create, before = Segment.create, num_mappings()
    if zcomm.group_rank() == 1:

        def reject(*_: object) -> None:
            raise OSError("no memory today")

        Segment.create = reject  # type: ignore[assignment]
    try:
        tensor = zcomm.shared_empty(1000)
    finally:
        Segment.create = create  # type: ignore[method-assign]
    zcomm.all_reduce(tensor.add_(1))
    return num_mappings() - before, tensor.sum().item()


@needs_extension
def test_if_one_rank_has_no_memory_all_get_ordinary_tensors() -> None:
    assert run_ranks(rank_has_no_memory, 2) == [(0, 2000.0)] * 2


def rank_falls_back() -> str:
    os.environ["ZCOMM_TRANSPORT"] = "gloo"
    tensor = zcomm.shared_empty(10)
    zcomm.all_reduce(tensor.add_(1))
    assert tensor.eq(2).all()
    return zcomm.transport()


def test_over_gloo_it_is_an_ordinary_tensor() -> None:
    assert run_ranks(rank_falls_back, 2) == ["gloo", "gloo"]


def rank_loses_one_of_two() -> None:
    """Free a shared tensor on one rank; the other's is still summed correctly, with copies."""
    first, second = zcomm.shared_empty(100_000), zcomm.shared_empty(100_000)
    if zcomm.group_rank() == 1:
        del first
        first = torch.zeros(100_000)
        gc.collect()
    for tensor in (first, second):
        zcomm.all_reduce(tensor.fill_(2))
        assert tensor.eq(4).all()
        zcomm.broadcast(tensor.fill_(zcomm.group_rank()))
        assert tensor.eq(0).all()


@needs_extension
def test_a_tensor_that_is_dead_on_one_rank_is_still_summed() -> None:
    run_ranks(rank_loses_one_of_two, 2)
