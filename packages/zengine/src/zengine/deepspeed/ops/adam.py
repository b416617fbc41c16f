"""zoptim's Adam with the arguments of DeepSpeed's classes.

The device of the tensors selects the kernel, not the class: a `FusedAdam` with offloaded states runs the CPU kernel.
"""

from __future__ import annotations

from typing import Any

import zoptim

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class _DeepSpeedAdam(zoptim.Adam):
    """Adam with DeepSpeed's state dict.  Checkpoints store the rule, so a run may switch to zoptim's or torch's.

    The mode (Adam or AdamW) belongs to the object: DeepSpeed's state dicts do not have it, and loading keeps it.
    """

    kept_options = (*zoptim.Adam.kept_options, "decoupled_weight_decay")

    @property
    def checkpoint_kind(self) -> str:
        """Rule of the state: "AdamW" or "Adam"."""
        return "AdamW" if self.adam_w_mode else "Adam"

    @property
    def adam_w_mode(self) -> bool:
        """True if the decay is decoupled (AdamW)."""
        return bool(self.param_groups[0]["decoupled_weight_decay"])


class FusedAdam(_DeepSpeedAdam):
    """AdamW, or Adam with `adam_w_mode=False`.  `set_grad_none` has no effect."""

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


class DeepSpeedCPUAdam(_DeepSpeedAdam):
    """AdamW, or Adam with `adamw_mode=False`.

    fp32_optimizer_states: moments in float32; False: in the parameter's dtype.  ds_adam_cpu_cores_perc: ignored.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        ds_adam_cpu_cores_perc: float = 0.8,
    ) -> None:
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=adamw_mode,
            bias_correction=bias_correction,
            state_dtype="fp32" if fp32_optimizer_states else None,
        )
