"""zoptim's Adagrad with the arguments of DeepSpeed's class."""

from __future__ import annotations

from typing import Any

import zoptim

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(zoptim.Adagrad):
    """Adagrad.  amsgrad is refused: Adagrad has none."""

    checkpoint_kind = "Adagrad"  # its state is that class's

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
            state_dtype=None if fp32_optimizer_states else "bf16",
        )
