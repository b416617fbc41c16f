"""Sharded weights: spans, hollow parameters, and transitions between states."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import Parameter

from zcomm.testing import run_ranks
from zpartition import ParamSpec, ZeroPolicy, plan_layout
from zpartition.layout.ranks import Ranks
from zpartition.memory.buffers import BufferPool
from zpartition.weights.sharded import ShardedState, ShardedStorage


def make(dtype: torch.dtype = torch.float32) -> tuple[ShardedStorage, list[Parameter]]:
    shapes = [(30, 40), (), (500,)]
    specs = [ParamSpec(f"p{i}", shape, dtype, unit="body") for i, shape in enumerate(shapes)]
    (bucket,) = plan_layout(specs, world_size=2, num_shards=2).buckets
    torch.manual_seed(0)
    params = {spec.name: Parameter(torch.randn(spec.shape).to(dtype)) for spec in specs}
    policy = ZeroPolicy(stage=3)
    storage = ShardedStorage.of(bucket, params, policy, Ranks.of(None, policy))
    storage.adopt(None)
    return storage, list(params.values())


def _comes_and_goes(dtype: torch.dtype) -> None:
    storage, params = make(dtype)
    torch.manual_seed(0)
    expected = [torch.randn(param.shape).to(dtype) for param in params]
    pool = BufferPool(torch.device("cpu"))
    assert all(bool(param.isnan().all()) for param in params)
    assert [param.shape for param in params] == [(30, 40), (), (500,)]
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        params[0].add_(1.0)
    storage.gather(pool, None)
    assert storage.sharded_state is ShardedState.GATHERING
    storage.arrive()
    assert all(map(torch.equal, params, expected))
    assert storage.moved() == ""
    with torch.no_grad():
        params[2].fill_(7.0)
    storage.adopt_weights()
    storage.release(pool)
    assert (storage.sharded_state, len(pool.free)) == (ShardedState.SHARDED, 1)
    storage.gather(pool, None)
    storage.arrive()
    assert bool((params[2] == 7.0).all())
    assert pool.num_made == 1, "the buffer is used again"
    params[0].data = params[0].data.clone()
    assert storage.moved() == "p0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_is_gathered_edited_and_left(dtype: torch.dtype) -> None:
    run_ranks(_comes_and_goes, 2, dtype)


def _masters() -> tuple[bool, bool, torch.dtype]:
    wide, _ = make(torch.float32)
    narrow, _ = make(torch.bfloat16)
    narrow.master.data.fill_(1.5)
    narrow.publish()
    return wide.shares_master, bool((narrow.own_span == 1.5).all()), narrow.master.dtype


def test_masters_are_apart_where_weights_are_narrow() -> None:
    assert run_ranks(_masters, 2) == [(True, True, torch.float32)] * 2


def test_whoever_fills_hollow_parameters_is_found_out() -> None:
    storage, params = make()
    assert not storage.was_written()
    with torch.no_grad():
        params[0].fill_(1.0)  # torch lets this pass: all elements are one number
    assert storage.was_written()
    assert not storage.was_written(), "told once"
    assert all(bool(param.isnan().all()) for param in params)


def _buffers_go() -> list[bool]:
    storage, _ = make()
    pool = BufferPool(torch.device("cpu"))
    storage.gather(pool, None)
    storage.arrive()
    assert storage.full is not None
    shown = [weakref.ref(storage.full.untyped_storage()), weakref.ref(storage.full)]
    storage.release(pool)
    pool.clear()
    return [ref() is None for ref in shown]


def test_a_buffer_that_the_pool_drops_is_gone() -> None:
    assert run_ranks(_buffers_go, 2) == [[True, True]] * 2
