"""`deepspeed.ops.aio`: tensors read from and written to files by threads, for scripts that move their own.

`AsyncIOBuilder().load()` returns this module.  Calls go through the page cache; an engine's offload to nvme uses
zpartition's store, which has direct I/O, checksums and recovery.
"""

# ruff: noqa: N801  (DeepSpeed's names)

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, final

import torch
from torch import Tensor

from zengine.deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder", "aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]

_ALIGNMENT = 4096  # bytes, for direct I/O: DeepSpeed's


@final
class aio_handle:
    """Reads and writes tensors.

    block_size: bytes of one call.  intra_op_parallelism: threads that share the calls of a tensor.
    queue_depth, single_submit, overlap_events: kept, without effect: there is no submission queue.

    Methods return the number of completed operations; errors of the system (OSError) name the file.
    """

    def __init__(
        self,
        block_size: int = 2**20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._block_size, self._queue_depth = block_size, queue_depth
        self._single_submit, self._overlap_events = single_submit, overlap_events
        self._pool = ThreadPoolExecutor(max(1, intra_op_parallelism), thread_name_prefix="aio")
        self._threads = max(1, intra_op_parallelism)
        self._pending: list[_Operation] = []

    def get_block_size(self) -> int:
        return self._block_size

    def get_queue_depth(self) -> int:
        return self._queue_depth

    def get_single_submit(self) -> bool:
        return self._single_submit

    def get_overlap_events(self) -> bool:
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        return self._threads

    def get_alignment(self) -> int:
        """Return the alignment in bytes that DeepSpeed asks of buffers; here any will do."""
        return self._threads * _ALIGNMENT

    def read(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Fill `buffer` from the file, from byte `file_offset` on.  validate: ignored; short files always raise."""
        return self.sync_pread(buffer, filename, file_offset)

    def write(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Write `buffer` to the file, which is created if missing, from byte `file_offset` on."""
        return self.sync_pwrite(buffer, filename, file_offset)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """As `read`."""
        return self._start(True, buffer, filename, file_offset).finish()

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """As `write`."""
        return self._start(False, buffer, filename, file_offset).finish()

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Begin to read; return 0.  `wait` ends it."""
        self._pending.append(self._start(True, buffer, filename, file_offset))
        return 0

    def async_pwrite(self, buffer: Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Begin to write to a file, or to an open descriptor; return 0.  `wait` ends it."""
        self._pending.append(self._start(False, buffer, filename, file_offset))
        return 0

    def pread(self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Read now, or with the fourth argument begin to."""
        chosen = self.async_pread if async_ else self.sync_pread
        return chosen(buffer, filename, file_offset)

    def pwrite(self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Write now, or with the fourth argument begin to."""
        chosen = self.async_pwrite if async_ else self.sync_pwrite
        return chosen(buffer, filename, file_offset)

    def wait(self) -> int:
        """Wait for all that was begun; return how many operations that were.  Raises the first error at the end."""
        pending, self._pending = self._pending, []
        errors = []
        for each in pending:
            try:
                each.finish()
            except (OSError, EOFError) as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Return a tensor for transfers, of zeros; page-locked if there is a GPU."""
        return torch.zeros(num_elem, dtype=example_tensor.dtype, pin_memory=torch.cuda.is_available())

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Return True; the memory is freed with the tensor."""
        return True

    def is_pinned(self, buffer: Tensor) -> bool:
        """Return True if transfers use the buffer itself: it is on the host, and contiguous."""
        return buffer.device.type == "cpu" and buffer.is_contiguous()

    def _start(self, is_read: bool, buffer: Tensor, file: str | int, offset: int) -> _Operation:
        return _Operation(is_read, buffer, file, offset, self)

    def _spread(self, operation: _Operation, size: int) -> list[Future[None]]:
        """Hand the blocks of an operation to the threads, one run of blocks to each."""
        blocks = range(0, size, self._block_size)
        share = max(1, -(-len(blocks) // self._threads))
        runs = [blocks[i : i + share] for i in range(0, len(blocks), share)]
        return [self._pool.submit(operation.run, run, self._block_size) for run in runs]


@final
class _Operation:
    """One tensor on its way."""

    def __init__(self, is_read: bool, buffer: Tensor, file: str | int, offset: int, handle: Any) -> None:
        self._is_read, self._buffer, self._file, self._offset = is_read, buffer, file, offset
        self._host = buffer if handle.is_pinned(buffer) else buffer.contiguous().cpu()
        raw: Any = self._host.detach().reshape(-1).view(torch.uint8).numpy()
        self._bytes = memoryview(raw)
        flags = os.O_RDONLY if is_read else os.O_WRONLY | os.O_CREAT
        self._fd = os.dup(file) if isinstance(file, int) else os.open(file, flags, 0o644)
        self._futures: list[Future[None]] = handle._spread(self, len(self._bytes))

    def run(self, starts: range, block: int) -> None:
        """Transfer the blocks that begin at `starts`."""
        for start in starts:
            at, end = start, min(start + block, len(self._bytes))
            while at < end:
                part = self._bytes[at:end]
                move = os.preadv if self._is_read else os.pwritev
                moved = move(self._fd, [part], self._offset + at)
                if moved == 0:
                    raise EOFError(
                        f"{self._file}: ends at byte {self._offset + at}, but the buffer needs "
                        f"{self._offset + len(self._bytes)} bytes. Pass a smaller buffer or another file_offset."
                    )
                at += moved

    def finish(self) -> int:
        """Wait; return 1.  Raises what went wrong."""
        try:
            wait(self._futures)  # all, before the descriptor is closed: its number may become another file's
            for future in self._futures:
                future.result()
        finally:
            os.close(self._fd)
        if self._is_read and self._host is not self._buffer:
            self._buffer.detach().copy_(self._host)
        return 1


def aio_read(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
) -> int:
    """Read with a handle of these settings."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).sync_pread(buffer, filename)


def aio_write(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
) -> int:
    """Write with a handle of these settings."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).sync_pwrite(buffer, filename)


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy `src` to `dest`; return 1."""
    dest.detach().copy_(src)
    return 1
