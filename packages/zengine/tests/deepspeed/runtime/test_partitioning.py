"""Partitions of lists and tensors; bounds are those of DeepSpeed 0.19.8."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zcomm.testing import run_ranks
from zengine.deepspeed.runtime import utils


@pytest.mark.parametrize(
    ("weights", "parts", "bounds"),
    [
        ([0, 1, 2, 3, 3, 3], 4, [0, 3, 4, 5, 6]),
        ([0.0, 1.1, 1.9, 3.0, 3.0, 3.0], 4, [0, 3, 4, 5, 6]),
        ([0.0, 1.1, 30, 3.0], 3, [0, 2, 3, 4]),
        ([6, 6, 0, 4, 8, 7], 2, [0, 4, 6]),
        ([6, 4, 7, 5, 9, 3, 8], 3, [0, 3, 5, 7]),
        ([1, 1, 5, 7, 8, 1, 5, 6, 5, 9, 3, 8], 5, [0, 4, 7, 9, 10, 12]),
        ([0, 9, 7], 5, [0, 1, 2, 3, 3, 3]),
        ([52559872, *[12596224] * 24, 0, 52559872], 1, [0, 27]),
    ],
)
def test_parts_are_balanced_as_in_deepspeed(weights: list[float], parts: int, bounds: list[int]):
    assert utils.partition_balanced(weights, parts) == bounds


def test_parts_of_equal_size_and_prefix_sums():
    found = [utils.partition_uniform(count, parts) for count, parts in ((10, 4), (2, 4), (8, 4))]
    assert found == [[0, 3, 6, 8, 10], [0, 1, 2, 2, 2], [0, 2, 4, 6, 8]]
    assert utils.prefix_sum_inc([3, 4, 5]) == [3, 7, 12]
    assert [each.numel() for each in utils.align_dense_tensors([torch.ones(3), torch.ones(2)], 4)] == [3, 2, 3]


def check_four() -> list[bool]:
    group, found = dist.new_group([0, 1, 2, 3]), []
    for shape in ((16, 3), (15, 5), (28, 3), (3,)):
        full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        part = utils.PartitionedTensor(full, group=group)
        again = utils.PartitionedTensor.from_meta(part.to_meta(), part.data(), group)
        found += [len(part.local_size()) == 1, torch.equal(part.full(), full), torch.equal(again.full(), full)]
        found.append(again.full_size() == list(shape))
    flat = torch.zeros(8)
    parts = list(flat.view(4, 2))
    parts[dist.get_rank()] = torch.full((2,), float(dist.get_rank()))
    utils.all_gather_dp_groups([flat], [parts], [group], 2, 100)
    return [*found, flat.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]]


def test_a_tensor_is_whole_again():
    assert all(all(found) for found in run_ranks(check_four, 4))
