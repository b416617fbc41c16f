"""zoptim's Adagrad with the arguments of DeepSpeed's class."""

from __future__ import annotations

from typing import Any

import zoptim

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(zoptim.Adagrad):
    """Adagrad.  amsgrad=True raises ValueError.

    fp32_optimizer_states: sums of squares in float32; False: in the parameter's dtype.
    """

    checkpoint_kind = "Adagrad"  # state format of that class

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ValueError("DeepSpeedCPUAdagrad(amsgrad=True): Adagrad has no amsgrad variant.")
        super().__init__(
            model_params,
            lr,
            weight_decay=weight_decay,
            eps=eps,
            state_dtype="fp32" if fp32_optimizer_states else None,
        )
