"""`deepspeed.linear`: linear layers with frozen, sharded or quantized weights, and low-rank adapters."""

from __future__ import annotations

from zengine.deepspeed.linear import config, context_manager, optimized_linear, quantization
from zengine.deepspeed.linear.config import LoRAConfig, QuantizationConfig
from zengine.deepspeed.linear.context_manager import Init, init_lora
from zengine.deepspeed.linear.optimized_linear import OptimizedLinear

__all__ = [
    "Init",
    "LoRAConfig",
    "OptimizedLinear",
    "QuantizationConfig",
    "config",
    "context_manager",
    "init_lora",
    "optimized_linear",
    "quantization",
]
