"""Memory as the operating system sees it: an address and a length.

O_DIRECT requires addresses, lengths and offsets that are multiples of the drive's block size.  `aligned_buffer`
allocates such memory; other memory is copied through a `BounceBuffer`, one chunk for each thread.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import final

import attrs
import torch
from torch import Tensor

ALIGNMENT = 4096  # bytes: fits the logical blocks of every drive, and is what memory pages have


def padded(num_bytes: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(num_bytes: int) -> Tensor:
    """Allocate (padded(num_bytes),) uint8 zeros on the CPU, on pages of its own."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, padded(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin for every transfer
    return torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages


@final
@attrs.frozen(eq=False)
class MemorySpan:
    """A span of memory, kept alive by its tensor."""

    address: int
    bytes: memoryview  # of exactly the stretch, writable
    owner: Tensor

    @classmethod
    def of(cls, tensor: Tensor, num_bytes: int) -> MemorySpan:
        """Return the first `num_bytes` of a contiguous CPU tensor of any dtype and shape.  Raises ValueError."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes < num_bytes:
            raise ValueError(
                f"the tensor is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, {tensor.nbytes:,} bytes, "
                f"{'' if tensor.is_contiguous() else 'not '}contiguous; pass a contiguous CPU tensor of at least "
                f"the region's {num_bytes:,} bytes, such as store.buffer({num_bytes})"
            )
        address = tensor.data_ptr()
        view = memoryview((ctypes.c_ubyte * num_bytes).from_address(address)) if num_bytes else memoryview(b"")
        return cls(address, view.cast("B"), tensor)

    def cut(self, start: int, stop: int) -> MemorySpan:
        """Return the bytes from `start` to `stop`."""
        return MemorySpan(self.address + start, self.bytes[start:stop], self.owner)

    @property
    def is_aligned(self) -> bool:
        """Check if O_DIRECT accepts the span."""
        return self.address % ALIGNMENT == 0 and len(self.bytes) % ALIGNMENT == 0


class BounceBuffer(threading.local):
    """One aligned chunk for each thread, allocated on first use."""

    def __init__(self) -> None:
        self.memory = MemorySpan.of(aligned_buffer(0), 0)

    def get(self, num_bytes: int) -> MemorySpan:
        """Return aligned memory of at least `num_bytes`, padded; valid until the thread's next `get`."""
        size = padded(num_bytes)
        if len(self.memory.bytes) < size:
            self.memory = MemorySpan.of(aligned_buffer(size), size)
        return self.memory.cut(0, size)
