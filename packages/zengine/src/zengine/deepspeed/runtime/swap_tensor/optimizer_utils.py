"""`deepspeed.runtime.swap_tensor.optimizer_utils`: not available; offload to files is the engine's."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["OptimizerSwapper"]

OptimizerSwapper = absent("runtime.swap_tensor.optimizer_utils.OptimizerSwapper")
