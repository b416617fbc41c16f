"""Buffer pool: reuse, fit, accounting."""

from __future__ import annotations

import pytest
import torch

import zcomm
from zcomm.testing import run_ranks
from zpartition.memory.buffers import Arena, BufferPool, flat_zeros


def test_the_smallest_fitting_buffer_is_reused():
    pool = BufferPool(torch.device("cpu"))
    large, small = pool.make(100, torch.float32), pool.make(50, torch.float32)
    pool.release(large)
    pool.release(small)
    assert pool.reuse(40, torch.float32) is small
    assert pool.reuse(40, torch.float32) is large
    assert pool.reuse(40, torch.float32) is None


def test_a_buffer_of_which_somebody_has_a_view_is_the_pools_no_more():
    pool = BufferPool(torch.device("cpu"))
    seen, unseen = pool.make(100, torch.float32), pool.make(50, torch.float32)
    view = seen[3:7]
    pool.reclaim(seen)
    pool.reclaim(unseen)
    assert pool.free == [unseen]
    assert (pool.num_made, pool.total_bytes) == (1, 200)
    assert view.sum() == 0


def test_another_dtype_does_not_fit():
    pool = BufferPool(torch.device("cpu"))
    pool.release(pool.make(100, torch.float32))
    assert pool.reuse(10, torch.bfloat16) is None


def test_bytes_are_counted_until_cleared():
    pool = BufferPool(torch.device("cpu"))
    kept, free = pool.make(100, torch.float32), pool.make(10, torch.float64)
    assert pool.total_bytes == 480
    pool.release(free)
    pool.clear()
    assert pool.total_bytes == kept.nbytes


def test_an_arena_is_cut_front_to_back_and_given_back_at_once() -> None:
    arena = Arena(torch.full((256,), 7, dtype=torch.uint8))
    first, second = arena.cut(9, torch.float32), arena.cut(16, torch.float32)
    assert first is not None
    assert second is not None
    assert (first.sum(), second.data_ptr() - first.data_ptr()) == (0, 64)
    assert arena.cut(40, torch.float32) is None
    first.fill_(1.0)
    arena.rewind()
    again = arena.cut(9, torch.float32)
    assert again is not None
    assert again.data_ptr() == first.data_ptr()
    assert not again.any()


def test_a_pool_takes_from_its_arena_while_there_is_room() -> None:
    pool = BufferPool(torch.device("cpu"), Arena(torch.zeros(256, dtype=torch.uint8)))
    inside, outside = pool.make(32, torch.float32), pool.make(64, torch.float32)
    assert inside.untyped_storage().data_ptr() == pool.arena.memory.untyped_storage().data_ptr()
    assert outside.untyped_storage().data_ptr() != inside.untyped_storage().data_ptr()
    pool.release(inside)
    pool.clear()
    assert pool.arena.used_bytes > 0, "one is still in use"
    pool.release(outside)
    pool.clear()
    assert pool.arena.used_bytes == 0


def _lies_in_shared_memory() -> bool:
    memory = flat_zeros(1000, torch.float32, torch.device("cpu"), None)
    memory += zcomm.group_rank()
    zcomm.all_reduce(memory)
    return bool((memory == 1).all())


def test_flat_memory_is_reduced_where_it_lies() -> None:
    assert run_ranks(_lies_in_shared_memory, 2) == [True, True]


def test_free_buffers_of_other_sizes_stay_within_the_limit() -> None:
    pool = BufferPool(torch.device("cpu"), limit_bytes=80)
    for numel, dtype in ((8, torch.float32), (4, torch.uint8)):
        pool.release(pool.obtain(numel, dtype))
    assert (pool.num_made, pool.total_bytes) == (2, 36)
    large = pool.obtain(16, torch.float32)
    assert (pool.num_made, pool.total_bytes) == (2, 68), "the one that was free for longest is gone, the other stays"
    pool.release(large)
    assert pool.obtain(2, torch.float32) is not large
    assert (pool.num_made, pool.total_bytes) == (3, 76)
    assert pool.obtain(16, torch.float32) is large


def test_trimming_drops_the_oldest_free_buffers_beyond_the_limit() -> None:
    pool = BufferPool(torch.device("cpu"), limit_bytes=5 * 2**25)
    held, *free = (pool.obtain(2**25, torch.uint8) for _ in range(7))
    for each in free:
        pool.release(each)
    pool.trim()
    assert pool.free[0] is free[2]
    assert (len(pool.free), pool.num_made, pool.total_bytes) == (4, 5, 5 * 2**25)
    pool.limit_bytes = 0
    pool.trim()
    assert pool.total_bytes == 2**26  # which a CPU may keep warm
    assert pool.obtain(2**25, torch.uint8).data_ptr() != held.data_ptr()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_keeps_no_free_buffer_warm() -> None:
    pool = BufferPool(torch.device("cuda"))
    pool.release(pool.obtain(100, torch.float32))
    pool.trim()
    assert (pool.free, pool.num_made, pool.total_bytes) == ([], 0, 0)
