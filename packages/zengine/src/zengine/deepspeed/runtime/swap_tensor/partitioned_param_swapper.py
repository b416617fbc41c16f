"""`deepspeed.runtime.swap_tensor.partitioned_param_swapper`: not available; offload to files is the engine's."""

from __future__ import annotations

from zengine.deepspeed.absent import absent
from zengine.deepspeed.marks import PartitionedParamStatus

__all__ = ["AsyncPartitionedParameterSwapper", "PartitionedParamStatus"]

AsyncPartitionedParameterSwapper = absent(
    "runtime.swap_tensor.partitioned_param_swapper.AsyncPartitionedParameterSwapper"
)
