"""`deepspeed.ops.adam`: zoptim's Adam with the arguments of DeepSpeed's classes."""

from __future__ import annotations

from zengine.deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from zengine.deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
