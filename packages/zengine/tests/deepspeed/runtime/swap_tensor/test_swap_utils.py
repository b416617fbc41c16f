"""Tensors to and from files by a handle of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zengine.deepspeed.absent import NotAvailable
from zengine.deepspeed.ops.op_builder import AsyncIOBuilder
from zengine.deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
    AsyncPartitionedParameterSwapper,
    PartitionedParamStatus,
)
from zengine.deepspeed.runtime.swap_tensor.utils import get_sized_buffers, swap_in_tensors, swap_out_tensors


def test_tensors_come_back_from_their_files(tmp_path: Path) -> None:
    handle = AsyncIOBuilder().load().aio_handle()
    paths = [str(tmp_path / name) for name in ("a", "b")]
    tensors = [torch.arange(6.0), torch.ones(3)]
    swap_out_tensors(handle, tensors, paths)
    assert handle.wait() == 2
    found = get_sized_buffers([torch.zeros(8), torch.zeros(3)], [6, 3])
    swap_in_tensors(handle, found, paths)
    assert handle.wait() == 2
    assert all(torch.equal(*pair) for pair in zip(found, tensors, strict=True))
    with pytest.raises(AssertionError, match="num_elems 9 > buffer 8"):
        get_sized_buffers([torch.zeros(8)], [9])


def test_swappers_say_what_moves_states_here() -> None:
    assert PartitionedParamStatus.AVAILABLE.name == "AVAILABLE"
    with pytest.raises(NotAvailable, match=r'"device": "nvme"'):
        AsyncPartitionedParameterSwapper({}, torch.float32)
