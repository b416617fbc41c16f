"""Gradient of one bucket, driven by hand."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from zpartition.gradients.bucket import BucketGradient, BucketPhase
from zpartition.layout.layout import ParamSpec, plan_layout
from zpartition.memory.buffers import BufferPool


def make(dtype: torch.dtype = torch.float32, local_dtype: torch.dtype = torch.float32) -> BucketGradient:
    specs = [ParamSpec("a", (3,), dtype), ParamSpec("b", (2, 2), dtype)]
    bucket = plan_layout(specs, world_size=1, num_shards=1).buckets[0]
    params = {"a": Parameter(torch.zeros(3, dtype=dtype)), "b": Parameter(torch.zeros(2, 2, dtype=dtype))}
    pool = BufferPool(torch.device("cpu"))
    return BucketGradient(bucket, tuple(params[slot.name] for slot in bucket.slots), local_dtype, pool)


def arrive(gradient: BucketGradient, index: int, value: float) -> bool:
    """What autograd does: accumulate in place, or set a fresh tensor; then the hook."""
    param = gradient.params[index]
    fresh = torch.full_like(param, value)
    if param.grad is None:
        param.grad = fresh
    else:
        param.grad += fresh
    return gradient.arrive(index)


def test_the_first_gradient_is_copied_and_later_ones_accumulate_in_place():
    gradient = make()
    gradient.open_round()
    gradient.adopt(gradient.pool.make(gradient.bucket.numel, torch.float32))
    assert not arrive(gradient, 0, 1.0)
    view = gradient.params[0].grad
    assert view.data_ptr() == gradient.local_pointer
    gradient.open_round()
    arrive(gradient, 0, 2.0)
    assert gradient.params[0].grad is view
    assert arrive(gradient, 1, 5.0)
    sent = gradient.seal()
    assert sent.sum().item() == 4 * 3.0 + 3 * 5.0
    assert gradient.phase is BucketPhase.IN_FLIGHT
    assert all(param.grad is None for param in gradient.params)


def test_half_gradients_are_added_in_fp32_and_dropped():
    gradient = make(torch.bfloat16)
    gradient.adopt(gradient.pool.make(gradient.bucket.numel, torch.float32))
    for value in (256.0, 1.0, 1.0):  # bf16 cannot say 257
        gradient.open_round()
        arrive(gradient, 0, value)
        assert gradient.params[0].grad is None
    assert gradient.seal()[0].item() == 258.0


def test_what_did_not_arrive_is_sent_as_zeros_even_from_a_used_buffer():
    gradient = make()
    gradient.open_round()
    gradient.adopt(torch.full((gradient.bucket.numel,), 7.0))
    arrive(gradient, 1, 1.0)
    sent = gradient.seal()
    assert sent.sum().item() == 3.0
    assert gradient.seen == {1}


def test_reset_gives_every_buffer_back_and_forgets():
    gradient = make()
    gradient.open_round()
    gradient.adopt(gradient.pool.make(gradient.bucket.numel, torch.float32))
    arrive(gradient, 0, 1.0)
    gradient.keep(gradient.seal(), 1.0, torch.float32)
    gradient.attach_grads()
    assert gradient.params[0].grad is not None
    gradient.reset()
    assert gradient.kept is None
    assert gradient.params[0].grad is None
    assert len(gradient.pool.free) == 1
    assert (gradient.phase, gradient.seen) == (BucketPhase.IDLE, set())


def test_a_second_contribution_is_added_to_what_is_kept():
    gradient = make()
    for value in (1.0, 3.0):
        gradient.open_round()
        gradient.adopt(
            gradient.pool.reuse(1, torch.float32) or gradient.pool.make(gradient.bucket.numel, torch.float32)
        )
        arrive(gradient, 0, value)
        gradient.keep(gradient.seal(), 0.5, torch.float32)
    assert gradient.kept[0].item() == 2.0
