"""The buffer pool: reuse, fit, accounting."""

from __future__ import annotations

import torch

from zpartition.buffers import BufferPool


def test_the_smallest_fitting_buffer_is_reused():
    pool = BufferPool(torch.device("cpu"))
    large, small = pool.make(100, torch.float32), pool.make(50, torch.float32)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take(40, torch.float32) is small
    assert pool.take(40, torch.float32) is large
    assert pool.take(40, torch.float32) is None


def test_another_dtype_does_not_fit():
    pool = BufferPool(torch.device("cpu"))
    pool.give_back(pool.make(100, torch.float32))
    assert pool.take(10, torch.bfloat16) is None


def test_bytes_are_counted_until_cleared():
    pool = BufferPool(torch.device("cpu"))
    kept, free = pool.make(100, torch.float32), pool.make(10, torch.float64)
    assert pool.total_bytes == 480
    pool.give_back(free)
    pool.clear()
    assert pool.total_bytes == kept.nbytes
