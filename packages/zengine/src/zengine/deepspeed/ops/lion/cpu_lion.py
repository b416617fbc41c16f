"""zoptim's Lion with the arguments of DeepSpeed's classes."""

from __future__ import annotations

from typing import Any

import zoptim

__all__ = ["DeepSpeedCPULion"]


class DeepSpeedCPULion(zoptim.Lion):
    """Lion with float32 momentum; with fp32_optimizer_states=False in the parameter's dtype."""

    checkpoint_kind = "Lion"  # state format of that class

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        dtype = "fp32" if fp32_optimizer_states else None
        super().__init__(model_params, lr, betas, weight_decay, state_dtype=dtype)
