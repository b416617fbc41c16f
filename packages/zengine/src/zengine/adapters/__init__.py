"""Adapters: a trained update of low rank beside frozen weights, which may be quantized.

    names = add_lora(model, LoRAConfig(lora_r=8, target_mods=["q_proj", "v_proj"]))
    engine, *_ = zengine.initialize(model=model, config="zero3.json")

PEFT's LoRA works through the same functions.
"""

from zengine.adapters.config import LoRAConfig, QuantizationConfig
from zengine.adapters.files import load_adapters, save_adapters
from zengine.adapters.lora import LoRALinear, add_lora
from zengine.adapters.merging import adapters_disabled, merge_lora, merged_weight, merged_weights
from zengine.adapters.quantized_base import QuantizedBase, quantize_base

__all__ = [
    "LoRAConfig",
    "LoRALinear",
    "QuantizationConfig",
    "QuantizedBase",
    "adapters_disabled",
    "add_lora",
    "load_adapters",
    "merge_lora",
    "merged_weight",
    "merged_weights",
    "quantize_base",
    "save_adapters",
]
