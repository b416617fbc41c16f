"""`deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper`: not available; offload to files is the engine's."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["PartitionedOptimizerSwapper"]

PartitionedOptimizerSwapper = absent("runtime.swap_tensor.partitioned_optimizer_swapper.PartitionedOptimizerSwapper")
