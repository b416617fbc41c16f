"""Several tensors reduced and scattered at once, on two ranks."""

from __future__ import annotations

from typing import Any

import torch

import zengine.deepspeed.comm as dist
from zcomm.testing import run_ranks
from zengine.deepspeed.runtime.comm.coalesced_collectives import all_to_all_quant_reduce, reduce_scatter_coalesced
from zengine.deepspeed.utils import groups


def check_parts() -> list[list[Any]]:
    rank, half = dist.get_rank(), torch.float16
    one = reduce_scatter_coalesced([torch.full((6,), float(rank), dtype=half)], dist.get_world_group())
    inputs = [rank * torch.arange(0, 6, dtype=half), rank * torch.arange(6, 9, dtype=half)]
    two = reduce_scatter_coalesced(inputs)
    short = reduce_scatter_coalesced([torch.ones(1)])
    return [each.tolist() for each in (*one, *two, *short)]


def test_each_rank_has_its_part_of_the_means():
    """Values of DeepSpeed 0.19.8."""
    first, second = run_ranks(check_parts, 2)
    assert first == [[0.5] * 3, [0.0, 0.5, 1.0], [3.0, 3.5], [1.0]]
    assert second == [[0.5] * 3, [1.5, 2.0, 2.5], [4.0], []]


def check_quantized() -> tuple[list[int], float]:
    torch.manual_seed(dist.get_rank())
    matrix, vector = torch.randn(64, 32), torch.ones(10)
    found = all_to_all_quant_reduce([matrix, vector], groups._get_local_all_to_all_group())
    exact = reduce_scatter_coalesced([matrix])[0]
    return [each.numel() for each in found], float((found[0] - exact).abs().max())


def test_four_bits_are_near():
    for sizes, error in run_ranks(check_quantized, 2):
        assert sizes == [1024, 5]
        assert 0 < error < 0.3  # a step of 4 bits, of values up to 3.5, halved by the mean
