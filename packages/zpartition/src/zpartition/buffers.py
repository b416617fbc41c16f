"""Flat gradient buffers, reused.

The first touch of a fresh page costs several times a write to a warm one, so buffers are kept over steps
instead of being freed, and at stage 2 a few of them serve all buckets in turn.
"""

from __future__ import annotations

from typing import final

import attrs
import torch


@final
@attrs.define(eq=False)
class BufferPool:
    """Zero-initialised flat buffers of one device, handed out and taken back.

    Invariant: a buffer is either in `free` or owned by exactly one bucket.
    """

    device: torch.device
    free: list[torch.Tensor] = attrs.field(factory=list)
    num_made: int = 0  # buffers that exist, free or not
    total_bytes: int = 0  # of those: they live as long as the pool, unless cleared

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The smallest free buffer of `dtype` with at least `numel` elements; None when there is none."""
        fitting = [buffer for buffer in self.free if buffer.dtype == dtype and buffer.numel() >= numel]
        if not fitting:
            return None
        best = min(fitting, key=torch.Tensor.numel)
        self.free = [buffer for buffer in self.free if buffer is not best]
        return best

    def make(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new zeroed buffer of exactly `numel` elements, owned by the caller until `give_back`."""
        buffer = torch.zeros(numel, dtype=dtype, device=self.device)
        self.total_bytes += buffer.nbytes
        self.num_made += 1
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that came from this pool."""
        self.free.append(buffer)

    def clear(self) -> None:
        """Drop every free buffer."""
        self.total_bytes -= sum(buffer.nbytes for buffer in self.free)
        self.num_made -= len(self.free)
        self.free.clear()
