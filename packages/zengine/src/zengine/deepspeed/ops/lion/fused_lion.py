"""zoptim's Lion with the arguments of DeepSpeed's class."""

from __future__ import annotations

from typing import Any

import zoptim

__all__ = ["FusedLion"]


class FusedLion(zoptim.Lion):
    """Lion with DeepSpeed's defaults: lr 1e-3, betas (0.9, 0.999)."""

    checkpoint_kind = "Lion"  # state format of that class

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
