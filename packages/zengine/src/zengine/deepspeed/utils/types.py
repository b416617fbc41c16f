"""`deepspeed.utils.types`: numbers of activations and norms in DeepSpeed's inference configs."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["GATED_ACTIVATION_TYPES", "ActivationFuncType", "NormType"]


class ActivationFuncType(IntEnum):
    """Activation of an MLP."""

    UNKNOWN = 0
    GELU = 1
    ReLU = 2
    GATED_GELU = 3
    GATED_SILU = 4


GATED_ACTIVATION_TYPES = [ActivationFuncType.GATED_GELU, ActivationFuncType.GATED_SILU]


class NormType(IntEnum):
    """Normalization layer."""

    UNKNOWN = 0
    LayerNorm = 1
    GroupNorm = 2
    RMSNorm = 3
