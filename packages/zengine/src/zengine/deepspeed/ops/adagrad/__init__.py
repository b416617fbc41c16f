"""`deepspeed.ops.adagrad`."""

from __future__ import annotations

from zengine.deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
