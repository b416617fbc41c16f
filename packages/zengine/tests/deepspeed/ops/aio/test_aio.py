"""Tensors that go to files and back."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from zengine.deepspeed.ops.aio import AsyncIOBuilder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_go_to_files_and_back(tmp_path: Path, dtype: torch.dtype):
    aio = AsyncIOBuilder().load()
    handle = aio.aio_handle(block_size=64, queue_depth=2, intra_op_parallelism=3)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (64, 2, 3)
    assert not handle.get_single_submit()
    assert not handle.get_overlap_events()
    sent, file = torch.arange(200).to(dtype), str(tmp_path / "t.bin")
    assert handle.sync_pwrite(sent, file) == 1
    assert Path(file).read_bytes() == sent.view(torch.uint8).numpy().tobytes()
    back = handle.new_cpu_locked_tensor(200, sent)
    assert handle.async_pread(back, file) == 0
    part = torch.empty(50, dtype=dtype)
    handle.async_pread(part, file, 100 * sent.element_size())
    assert handle.wait() == 2
    assert handle.wait() == 0
    assert torch.equal(back, sent)
    assert torch.equal(part, sent[100:150])
    strided = torch.zeros(200, 2, dtype=dtype)[:, 0]
    assert not handle.is_pinned(strided)
    assert handle.read(strided, file, True) == handle.pread(strided, file, True, False) == 1
    assert torch.equal(strided, sent)
    assert handle.free_cpu_locked_tensor(back)


def test_short_and_missing_files_are_named(tmp_path: Path):
    handle, file = AsyncIOBuilder().load().aio_handle(), str(tmp_path / "short.bin")
    handle.sync_pwrite(torch.zeros(10), file)
    with pytest.raises(EOFError, match=r"short.bin: ends at byte 40, but the buffer needs 80 bytes"):
        handle.sync_pread(torch.zeros(20), file)
    with pytest.raises(FileNotFoundError, match=r"none\.bin"):
        handle.async_pread(torch.zeros(1), str(tmp_path / "none.bin"))


def test_an_error_leaves_no_file_open_and_ends_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    handle, file = AsyncIOBuilder().load().aio_handle(block_size=4096, intra_op_parallelism=2), str(tmp_path / "a")
    handle.sync_pwrite(torch.arange(100.0), file)
    open_before = len(os.listdir("/proc/self/fd"))
    short, turned = torch.zeros(200), torch.zeros(10, 10).t()  # the second passes through a copy
    handle.async_pread(short, file)
    handle.async_pread(turned, file)
    with pytest.raises(EOFError, match="ends at byte 400"):
        handle.wait()
    assert torch.equal(turned, torch.arange(100.0).view(10, 10))
    assert len(os.listdir("/proc/self/fd")) == open_before
    write, late = os.pwritev, threading.Event()

    def fail_first(fd: int, parts: list[memoryview], at: int) -> int:
        if at == 0:
            raise OSError("planted")
        assert not late.wait(0.2)
        return write(fd, parts, at)  # the descriptor is still this file's

    monkeypatch.setattr(os, "pwritev", fail_first)
    with pytest.raises(OSError, match="planted"):
        handle.sync_pwrite(torch.ones(4096), file)
    assert Path(file).stat().st_size == 4 * 4096


def test_functions_of_the_op(tmp_path: Path):
    aio, file = AsyncIOBuilder().load(), str(tmp_path / "t.bin")
    sent, back = torch.rand(30), torch.zeros(30)
    aio.aio_write(sent, file, 1024, 2, False, False)
    aio.aio_read(back, file, 1024, 2, False, False)
    assert torch.equal(back, sent)
    assert aio.deepspeed_memcpy(back, torch.ones(30))
    assert back.sum() == 30
