"""`deepspeed.runtime.swap_tensor.async_swapper`: not available; offload to files is the engine's."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["AsyncTensorSwapper"]

AsyncTensorSwapper = absent("runtime.swap_tensor.async_swapper.AsyncTensorSwapper")
