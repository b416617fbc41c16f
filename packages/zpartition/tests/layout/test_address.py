"""Addresses of whole tensors."""

from __future__ import annotations

import pytest
import torch

from zpartition.layout.address import Address, LazyShard, full_box, whole


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


def test_memory_that_is_not_flat_is_rejected():
    with pytest.raises(ValueError, match="w: a shard needs contiguous memory"):
        whole("w", torch.zeros(2, 3).T)


def test_a_lazy_shard_makes_its_values_when_asked():
    source = torch.zeros(3)
    shard = LazyShard("w", (3,), ((0, 3),), (0, 3), source.clone)
    source += 1
    assert shard.tensor.tolist() == [1, 1, 1]
    assert shard.tensor is not shard.tensor


def test_parts_of_an_address_say_where_each_element_of_a_span_lies() -> None:
    whole_tensor = torch.arange(48).view(12, 4)
    boxes = (((2, 4), (0, 4)), ((6, 8), (0, 4)))
    address = Address((12, 4), boxes)
    local = torch.cat([whole_tensor[2:4], whole_tensor[6:8]]).reshape(-1)
    assert address.shape == (4, 4)
    for span in ((0, 16), (3, 5), (7, 9), (9, 16), (4, 4)):
        values = local[slice(*span)]
        seen = []
        for box, (lo, hi), part in address.parts(span):
            flat = whole_tensor[tuple(slice(*side) for side in box)].reshape(-1)
            assert torch.equal(flat[lo:hi], values[part])
            seen += range(part.start, part.stop)
        assert seen == list(range(span[1] - span[0]))


def test_a_scalar_and_an_empty_tensor_have_an_address_too() -> None:
    assert list(Address.whole(()).parts((0, 1))) == [((), (0, 1), slice(0, 1))]
    assert list(Address.whole((0, 3)).parts((0, 0))) == [(((0, 0), (0, 3)), (0, 0), slice(0, 0))]
