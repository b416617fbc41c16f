"""`deepspeed.ops.adam.fused_adam`."""

from __future__ import annotations

from typing import Any

from zengine.deepspeed.ops.adam.mode import DeepSpeedAdam

__all__ = ["FusedAdam"]


class FusedAdam(DeepSpeedAdam):
    """AdamW, or Adam with `adam_w_mode=False`.  `set_grad_none` has no effect.

    Raises RuntimeError for `amsgrad=True`, as DeepSpeed's does.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support amsgrad; zoptim.AdamW(amsgrad=True) does.")
        super().__init__(
            params, lr, betas, eps, weight_decay, decoupled_weight_decay=adam_w_mode, bias_correction=bias_correction
        )
