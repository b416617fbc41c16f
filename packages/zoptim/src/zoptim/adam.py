"""Adam and AdamW, drop-in for torch.optim's: same arguments, same state, same curve.

Both are one algorithm with the decay in two places.  Against torch they add `bias_correction`, choose
the fused kernel by themselves, and speak `grad_scale` / `found_inf` on every path.  They leave out
`differentiable` (no autograd through the step) and `capturable` (the fused path keeps its step count on
the device and needs no flag).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import _compat
from ._compat import AdamLists
from .batch import Batch, Path
from .checks import check_adam
from .flat import FlatOptimizer, Params

__all__ = ["Adam", "AdamW"]


class Adam(FlatOptimizer):
    """Adam (Kingma and Ba 2015); with `decoupled_weight_decay`, AdamW.

    lr >= 0 (a number, or a tensor of one element); betas in [0, 1); eps >= 0; weight_decay >= 0, added to
    the gradient unless decoupled.  `bias_correction=False` uses the moments as they are.  `fused` and
    `foreach` force a path; None takes the fused kernel wherever device, dtype and layout allow it.

    State of a parameter, by torch's names: `step` () float32; `exp_avg`, `exp_avg_sq` and, with amsgrad,
    `max_exp_avg_sq` of the parameter's shape, dtype and device.

    Raises ValueError or TypeError naming the argument that is out of range.
    """

    _fused_on = _compat.FUSED_ADAM_ON
    _absent_options: ClassVar[Mapping[str, Any]] = {
        **FlatOptimizer._absent_options,
        "amsgrad": False,
        "decoupled_weight_decay": False,
        "bias_correction": True,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        bias_correction: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas) if isinstance(betas, list) else betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_adam(options)

    def _state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        keys = ("step", "exp_avg", "exp_avg_sq")
        return (*keys, "max_exp_avg_sq") if group["amsgrad"] else keys

    def _init_state(self, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        step, *moments = self._state_keys(group)
        state: dict[str, Any] = {step: torch.zeros((), dtype=torch.float32, device=param.device)}
        for key in moments:
            state[key] = torch.zeros_like(param, requires_grad=False)
        return state

    def _update(self, group: Mapping[str, Any], batch: Batch) -> None:
        if batch.path is Path.FUSED:
            _advance(batch)
            _compat.fused_adam(group, _lists(group, batch), batch.signals)
        elif not batch.is_skipped():
            if batch.signals.grad_scale is not None:
                _compat.divide_(batch.grads, batch.signals.grad_scale)
            _compat.foreach_adam(group, _lists(group, batch))  # advances the steps that it is given
            if not group["bias_correction"]:
                _advance(batch)


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019): the decay shrinks the weights directly.

    Arguments, state and errors as in Adam; weight_decay is 0.01 by default, as in torch.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        bias_correction: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            decoupled_weight_decay=True,
            bias_correction=bias_correction,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # as in torch: AdamW stays AdamW, whoever wrote the state
            group["decoupled_weight_decay"] = True


def _lists(group: Mapping[str, Any], batch: Batch) -> AdamLists:
    """The batch as lists; without bias correction the kernel sees an infinite step, whose corrections are 1."""
    steps = batch.state("step")
    if not group["bias_correction"]:
        steps = [torch.full_like(steps[0], math.inf)] * len(steps)
    return AdamLists(
        params=batch.params,
        grads=batch.grads,
        exp_avgs=batch.state("exp_avg"),
        exp_avg_sqs=batch.state("exp_avg_sq"),
        max_exp_avg_sqs=batch.state("max_exp_avg_sq") if group["amsgrad"] else [],
        steps=steps,
    )


def _advance(batch: Batch) -> None:
    """Add one to the step counts, or nothing when found_inf is set; decided on the device."""
    steps = batch.state("step")
    found_inf = batch.signals.found_inf
    _compat.add_(steps, torch.ones_like(steps[0]) if found_inf is None else 1 - found_inf)
