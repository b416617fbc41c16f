"""`deepspeed.runtime.fp16.unfused_optimizer`: half precision without ZeRO, over any optimizer."""

from __future__ import annotations

from zengine.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

__all__ = ["FP16_UnfusedOptimizer"]


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):  # noqa: N801 - DeepSpeed's name
    """Optimizer of an engine at stage 0 in fp16 or bf16, other than a fused Adam."""

    __slots__ = ()
