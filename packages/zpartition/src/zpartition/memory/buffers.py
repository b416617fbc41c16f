"""Flat gradient buffers, reused.

The first touch of a fresh page costs several times a write to a warm one, so buffers are kept over steps instead of
being freed, and at stage 2 a few of them serve all buckets in turn.  Long buffers of a pool ask for huge pages: the
first copy into 48 MB then takes 13 ms instead of 72.

On CPUs they are cut from an `Arena` that all ranks of a host have mapped: its contents are reduced in place, without
a copy.  The position of a bucket in it may differ between ranks.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import final

import attrs
import torch
from torch.distributed import ProcessGroup

import zcomm
from zpartition import _compat

_LINE_BYTES = 64
_PAGE_BYTES, _HUGE_BYTES, _WARM_BYTES = 4096, 2**21, 2**26


def flat_zeros(numel: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup | None) -> torch.Tensor:
    """Return flat memory for weights, which collectives read in place where they can; a collective."""
    if device.type == "cpu" and zcomm.group_size(group) > 1:
        return zcomm.shared_empty(numel, dtype, group)
    return torch.zeros(numel, dtype=dtype, device=device)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the system's call; None where there are no huge pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def _with_huge_pages(buffer: torch.Tensor) -> torch.Tensor:
    """Return `buffer`, before its first touch; a system that says no changes the speed alone."""
    if buffer.device.type == "cpu" and buffer.nbytes >= 2 * _HUGE_BYTES and (madvise := _madvise()) is not None:
        start = -(-buffer.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
        end = (buffer.data_ptr() + buffer.nbytes) // _PAGE_BYTES * _PAGE_BYTES
        madvise(start, end - start, mmap.MADV_HUGEPAGE)
    return buffer


@final
@attrs.define(eq=False)
class Arena:
    """Memory that buffers are cut from, front to back; released all at once."""

    memory: torch.Tensor  # (bytes,) uint8
    used_bytes: int = 0

    @classmethod
    def create(cls, num_bytes: int, device: torch.device, group: ProcessGroup | None) -> Arena:
        """Map an arena; empty where ranks cannot map each other's memory.  A collective."""
        maps = device.type == "cpu" and zcomm.group_size(group) > 1
        return cls(flat_zeros(num_bytes if maps else 0, torch.uint8, device, group))

    def cut(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a zeroed buffer; None if there is no room."""
        end = self.used_bytes + numel * dtype.itemsize
        if end > self.memory.numel():
            return None
        found = self.memory[self.used_bytes : end].view(dtype).zero_()
        self.used_bytes = -(-end // _LINE_BYTES) * _LINE_BYTES
        return found

    def rewind(self) -> None:
        """Release all buffers."""
        self.used_bytes = 0


@final
@attrs.define(eq=False)
class BufferPool:
    """Flat buffers of one device, reused.

    Invariant: a buffer is either in `free` or owned by exactly one bucket.
    """

    device: torch.device
    arena: Arena = attrs.field(factory=lambda: Arena(torch.empty(0, dtype=torch.uint8)))
    free: list[torch.Tensor] = attrs.field(factory=list)
    num_made: int = 0  # buffers that exist, free or not
    total_bytes: int = 0  # of all buffers: they live as long as the pool, unless cleared
    limit_bytes: int = 0  # of all buffers: `obtain` keeps free ones up to this

    def reuse(self, numel: int, dtype: torch.dtype, most_numel: int = sys.maxsize) -> torch.Tensor | None:
        """Return the smallest free buffer of `dtype` with `numel` to `most_numel` elements; None if there is none."""
        fitting = [b for b in self.free if b.dtype == dtype and numel <= b.numel() <= most_numel]
        if not fitting:
            return None
        best = min(fitting, key=torch.Tensor.numel)
        self.free = [buffer for buffer in self.free if buffer is not best]
        return best

    def make(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a zeroed buffer of exactly `numel` elements, owned by the caller until `release`."""
        cut = self.arena.cut(numel, dtype)
        return self._count(torch.zeros(numel, dtype=dtype, device=self.device) if cut is None else cut)

    def obtain(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of `numel` elements with any contents and memory of its own, owned until `release`.

        A larger one would be missing where it is needed, so that the pool grows by another.
        """
        buffer = self.reuse(numel, dtype, numel)
        if buffer is None:
            while self.free and self.total_bytes + numel * dtype.itemsize > self.limit_bytes:
                self._drop(self.free[0])  # the one that has been free for longest
            buffer = self._count(_with_huge_pages(torch.empty(numel, dtype=dtype, device=self.device)))
        return buffer

    def release(self, buffer: torch.Tensor) -> None:
        """Return a buffer of this pool to it."""
        self.free.append(buffer)

    def reclaim(self, buffer: torch.Tensor) -> None:
        """Release a buffer that user code has seen; a buffer with other views is left to them.

        It must have memory of its own, not an arena's.
        """
        if not _compat.has_other_views(buffer):
            self.release(buffer)
            return
        self.total_bytes -= buffer.nbytes
        self.num_made -= 1

    def trim(self) -> None:
        """Drop free buffers beyond the limit, those that have been free for longest first.

        On a CPU 64 MiB may stay, whose first touch would take longer than the next gather into them.
        """
        most = max(self.limit_bytes, _WARM_BYTES if self.device.type == "cpu" else 0)
        while self.free and self.total_bytes > most:
            self._drop(self.free[0])

    def clear(self) -> None:
        """Drop every free buffer."""
        while self.free:
            self._drop(self.free[-1])
        if not self.num_made:
            self.arena.rewind()

    def _count(self, buffer: torch.Tensor) -> torch.Tensor:
        self.total_bytes += buffer.nbytes
        self.num_made += 1
        return buffer

    def _drop(self, buffer: torch.Tensor) -> None:
        self.free = [other for other in self.free if other is not buffer]
        self.total_bytes -= buffer.nbytes
        self.num_made -= 1
