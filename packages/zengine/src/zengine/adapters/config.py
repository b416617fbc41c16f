"""Settings of adapters, by DeepSpeed's names."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["DEFAULT_TARGETS", "LoRAConfig", "QuantizationConfig"]

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class LoRAConfig:
    """Low-rank adapters."""

    lora_r: int = 64  # rank
    lora_alpha: float = 16.0  # the adapter's output is multiplied by lora_alpha / lora_r
    base_weight_sharding: int = 1  # ranks that share the frozen weight of an OptimizedLinear: 1, or all ranks
    offload: bool = False  # frozen weights rest on the host
    offload_ratio: float = 0.0  # ignored: offload is of all weights or none
    delay_lora_init: bool = False  # adapters of an OptimizedLinear are made by `init_lora`
    target_mods: list[str] = field(default_factory=lambda: list(DEFAULT_TARGETS))  # layers with adapters, by name


@dataclass
class QuantizationConfig:
    """Floating-point codes of frozen weights."""

    q_bits: int = 8  # 8, 12 or 6: bits of a number
    mantissa_bits: int = 3  # of them, behind the leading one
    group_size: int = 512  # consecutive numbers that share a scale
    q_dtype: torch.dtype = torch.uint8  # of the stored codes
