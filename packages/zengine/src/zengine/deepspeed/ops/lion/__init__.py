"""`deepspeed.ops.lion`."""

from __future__ import annotations

from zengine.deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from zengine.deepspeed.ops.lion.fused_lion import FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
