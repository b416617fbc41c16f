"""`deepspeed.linear.config`: settings of LoRA layers and of quantized weights."""

from __future__ import annotations

from zengine.adapters.config import LoRAConfig, QuantizationConfig

__all__ = ["LoRAConfig", "QuantizationConfig"]
