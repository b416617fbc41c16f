"""Memory as the operating system sees it: an address and a length.

O_DIRECT wants addresses, lengths and offsets that are multiples of the drive's block.  `aligned` makes such memory;
any other goes through a `Bounce`, one chunk a thread.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import final

import attrs
import torch
from torch import Tensor

from .options import ALIGNMENT


def padded(num_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned(num_bytes: int) -> Tensor:
    """(padded(num_bytes),) uint8 on the CPU, zeros, at an address that is a multiple of it: pages of its own."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, padded(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin for every transfer
    return torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages


@final
@attrs.frozen(eq=False)
class Memory:
    """A stretch of memory, kept alive by the tensor that it is of."""

    address: int
    bytes: memoryview  # of exactly the stretch, writable
    owner: Tensor

    @classmethod
    def of(cls, tensor: Tensor, num_bytes: int) -> Memory:
        """The first `num_bytes` of a contiguous tensor on the CPU, of any dtype and shape."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes < num_bytes:
            raise ValueError(
                f"the tensor is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, {tensor.nbytes:,} bytes, "
                f"{'' if tensor.is_contiguous() else 'not '}contiguous; give a contiguous one on the CPU with at "
                f"least the region's {num_bytes:,} bytes, such as store.buffer({num_bytes})"
            )
        address = tensor.data_ptr()
        view = memoryview((ctypes.c_ubyte * num_bytes).from_address(address)) if num_bytes else memoryview(b"")
        return cls(address, view.cast("B"), tensor)

    def cut(self, start: int, stop: int) -> Memory:
        """Bytes start to stop of it."""
        return Memory(self.address + start, self.bytes[start:stop], self.owner)

    @property
    def is_aligned(self) -> bool:
        """Whether O_DIRECT takes it as it is."""
        return self.address % ALIGNMENT == 0 and len(self.bytes) % ALIGNMENT == 0


class Bounce(threading.local):
    """One aligned chunk for each thread, made when it is first needed."""

    def __init__(self) -> None:
        self.memory = Memory.of(aligned(0), 0)

    def take(self, num_bytes: int) -> Memory:
        """Aligned memory of at least `num_bytes`, padded; valid until the thread's next `take`."""
        size = padded(num_bytes)
        if len(self.memory.bytes) < size:
            self.memory = Memory.of(aligned(size), size)
        return self.memory.cut(0, size)
