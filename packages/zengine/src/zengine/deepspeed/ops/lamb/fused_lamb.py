"""zoptim's LAMB with the arguments of DeepSpeed's class."""

from __future__ import annotations

from typing import Any

import zoptim

__all__ = ["FusedLamb"]


class FusedLamb(zoptim.LAMB):
    """LAMB.  max_grad_norm and amsgrad raise; clip with the config's `gradient_clipping`."""

    checkpoint_kind = "LAMB"  # state format of that class

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if max_grad_norm:
            raise ValueError(
                f"FusedLamb(max_grad_norm={max_grad_norm}): the engine clips; set gradient_clipping in the config."
            )
        if amsgrad:
            raise RuntimeError("FusedLamb(amsgrad=True): LAMB has no amsgrad variant.")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            eps_inside_sqrt=eps_inside_sqrt,
            min_coeff=min_coeff,
            max_coeff=max_coeff,
        )
