"""`deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper`: not available; offload to files is the engine's."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["PipelinedOptimizerSwapper"]

PipelinedOptimizerSwapper = absent("runtime.swap_tensor.pipelined_optimizer_swapper.PipelinedOptimizerSwapper")
