"""Flat parameter storage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from zpartition import ZeroPolicy
from zpartition.layout.layout import ParamSpec, plan_layout
from zpartition.weights.storage import BucketStorage


def make(dtype: torch.dtype, rank: int = 0, num_shards: int = 1) -> tuple[BucketStorage, dict[str, Parameter]]:
    torch.manual_seed(0)
    params = {"a": Parameter(torch.randn(3, 5).to(dtype)), "b": Parameter(torch.randn(2000).to(dtype))}
    specs = [ParamSpec(name, tuple(p.shape), dtype) for name, p in params.items()]
    bucket = plan_layout(specs, world_size=num_shards, num_shards=num_shards).buckets[0]
    ordered = tuple(params[slot.name] for slot in bucket.slots)
    flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
    return BucketStorage.create(bucket, ordered, ZeroPolicy(), rank, flat), params


def test_parameters_become_views_with_the_same_values_and_identity():
    torch.manual_seed(0)
    expected = torch.randn(3, 5)
    storage, params = make(torch.float32)
    assert torch.equal(params["a"], expected)
    assert params["a"].untyped_storage().data_ptr() == storage.flat.untyped_storage().data_ptr()
    assert storage.moved() == ""


def test_in_full_precision_the_optimizer_updates_the_module_itself():
    storage, params = make(torch.float32, rank=1, num_shards=2)
    assert storage.shares_master
    storage.master.data.fill_(4.0)
    lo = storage.span[0]
    assert (storage.flat[:lo] != 4.0).all()
    assert params["b"][-1 if storage.bucket.slots[0].name == "a" else 1500].item() == 4.0


def test_in_half_precision_the_master_is_apart_and_published_by_a_cast():
    storage, params = make(torch.bfloat16)
    assert not storage.shares_master
    assert storage.master.dtype == torch.float32
    storage.master.data += 1e-3  # below bf16's resolution for most values
    before = params["a"].clone()
    storage.publish()
    assert torch.equal(storage.flat, storage.master.data.to(torch.bfloat16))
    assert params["a"].shape == before.shape


def test_a_parameter_that_was_moved_is_named():
    storage, params = make(torch.float32)
    params["b"].data = params["b"].data.clone()
    assert storage.moved() == "b"


@pytest.mark.parametrize("change", [torch.Tensor.t, lambda data: data[:, :4]], ids=["transposed", "cut"])
def test_a_parameter_that_is_seen_in_another_way_is_named(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """At the same address: gradients would be added in another order than the weights have."""
    storage, params = make(torch.float32)
    params["a"].data = change(params["a"].data)
    assert storage.moved() == "a"


def test_memory_that_moves_with_its_parameters_and_empty_ones_have_not_moved() -> None:
    specs = [ParamSpec("empty", (0, 3), torch.float32), ParamSpec("a", (2, 2), torch.float32)]
    bucket = plan_layout(specs, world_size=1, num_shards=1).buckets[0]
    params = tuple(Parameter(torch.ones(slot.shape)) for slot in bucket.slots)
    storage = BucketStorage.create(bucket, params, ZeroPolicy(), 0, torch.zeros(bucket.numel))
    assert storage.moved() == ""
    storage.flat = storage.flat.clone()
    assert storage.moved() == "a"
    for slot, param in zip(bucket.slots, params):
        param.data = storage.flat[slot.offset : slot.end].view(slot.shape)
    assert storage.moved() == ""


def test_close_gives_every_parameter_its_own_memory():
    storage, params = make(torch.float32)
    values = {name: p.detach().clone() for name, p in params.items()}
    storage.close()
    storage.flat.zero_()
    assert all(torch.equal(params[name], value) for name, value in values.items())
