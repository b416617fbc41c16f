"""`deepspeed.linear`: linear layers with frozen, sharded or quantized weights, and low-rank adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
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

_HOME_OF = homes_below(
    __name__,
    {
        "config": "LoRAConfig QuantizationConfig",
        "context_manager": "Init init_lora",
        "optimized_linear": "OptimizedLinear",
    },
)  # imported on first use

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF, with_submodules=True)
