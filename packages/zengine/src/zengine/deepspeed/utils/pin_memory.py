"""`deepspeed.utils.pin_memory`: not available; torch pins memory."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["NativePinnedMemory"]

NativePinnedMemory = absent("utils.pin_memory.NativePinnedMemory")
