"""`deepspeed.runtime.fp16.fused_optimizer`: half precision without ZeRO, over a fused Adam."""

from __future__ import annotations

from zengine.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

__all__ = ["FP16_Optimizer"]


class FP16_Optimizer(DeepSpeedOptimizer):  # noqa: N801 - DeepSpeed's name
    """Optimizer of an engine at stage 0 in fp16 or bf16, if it is Adam or AdamW from the config."""

    __slots__ = ()
