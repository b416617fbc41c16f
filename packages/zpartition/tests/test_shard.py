"""Addresses of whole tensors."""

from __future__ import annotations

import pytest
import torch

from zpartition.shard import LazyShard, full_box, whole


def test_a_whole_tensor_covers_its_box_and_shares_its_memory():
    tensor = torch.arange(6.0).view(2, 3)
    shard = whole("w", tensor)
    assert (shard.name, shard.global_shape, shard.box, shard.span) == ("w", (2, 3), ((0, 2), (0, 3)), (0, 6))
    shard.tensor.zero_()
    assert not tensor.any()


def test_a_scalar_has_an_empty_box_and_one_element():
    shard = whole("s", torch.tensor(3.0))
    assert (shard.global_shape, shard.box, shard.span) == ((), (), (0, 1))
    assert full_box(()) == ()


def test_memory_that_is_not_flat_is_refused():
    with pytest.raises(ValueError, match="w: a shard needs contiguous memory"):
        whole("w", torch.zeros(2, 3).T)


def test_a_lazy_shard_makes_its_values_when_asked():
    source = torch.zeros(3)
    shard = LazyShard("w", (3,), ((0, 3),), (0, 3), source.clone)
    source += 1
    assert shard.tensor.tolist() == [1, 1, 1]
    assert shard.tensor is not shard.tensor
