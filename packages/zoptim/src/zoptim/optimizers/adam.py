"""Adam and AdamW, drop-in for torch.optim's: same arguments, same state, same curve.

They are one algorithm with the decay in two places.  Added to torch's: `bias_correction`, state formats, and
`grad_scale` / `found_inf` on every path.  Missing: `differentiable` (no autograd through the step) and `capturable`
(the GPU kernel always keeps the step count on the device).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoptim import _compat
from zoptim._compat import AdamLists
from zoptim.backends.contract import Flag, Hyper, flags_of
from zoptim.backends.signals import Signals
from zoptim.checks import flag, number
from zoptim.optimizers.base import Params, check_betas, check_common
from zoptim.optimizers.flat import FlatOptimizer
from zoptim.rules.elementwise import AdamMoments, adam_rule, adamw_rule
from zoptim.states.spec import StateSpec
from zoptim.updates.fallback import fits_foreach
from zoptim.updates.plan import Entry

__all__ = ["Adam", "AdamW"]

_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq"})


class Adam(FlatOptimizer):
    """Adam (Kingma and Ba 2015); with `decoupled_weight_decay`, AdamW.

    lr >= 0 (a number, or a tensor of one element); betas in [0, 1); eps >= 0; weight_decay >= 0, added to
    the gradient unless decoupled.  `bias_correction=False` uses uncorrected moments.  For `state_dtype`,
    `split_master`, `fused` and `foreach` see FlatOptimizer.

    State of a parameter, by torch's names: `step` () float32; `exp_avg`, `exp_avg_sq` and, with amsgrad,
    `max_exp_avg_sq` of the parameter's shape and device; a `..._scale` for each with state_dtype "8bit"; `remainder`
    with split_master.

    Raises ValueError or TypeError naming the argument that is out of range.
    """

    _rule = "adam"
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
        state_dtype: torch.dtype | str | None = None,
        split_master: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
            "state_dtype": state_dtype,
            "split_master": split_master,
        }
        super().__init__(params, defaults)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_adam(options)

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
        return self._make_state_spec(group, names, squares=_SQUARES, counts=True)

    def _flags(self, group: Mapping[str, Any]) -> int:
        chosen = {
            Flag.DECOUPLED: group["decoupled_weight_decay"],
            Flag.AMSGRAD: group["amsgrad"],
            Flag.MAXIMIZE: group["maximize"],
            Flag.NO_CORRECTION: not group["bias_correction"],
        }
        return flags_of(chosen)

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        return Hyper(lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=decay)

    def _evaluate(
        self, group: Mapping[str, Any], param: Tensor, grad: Tensor, moments: dict[str, Tensor], step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        rule = adamw_rule if group["decoupled_weight_decay"] else adam_rule
        new, after = rule(
            param,
            grad,
            AdamMoments(step=step - 1, **moments),
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            bias_correction=group["bias_correction"],
        )
        return new, {name: getattr(after, name) for name in moments}

    def _update_in_torch(self, group: Mapping[str, Any], entries: list[Entry], signals: Signals) -> None:
        if not fits_foreach(entries) or not group["bias_correction"]:
            super()._update_in_torch(group, entries, signals)
            return

        def column(name: str) -> list[Tensor]:
            return [entry.state[name] for entry in entries]

        lists = AdamLists(
            params=[entry.param for entry in entries],
            grads=_compat.divide([entry.grad for entry in entries], signals.grad_scale),
            exp_avgs=column("exp_avg"),
            exp_avg_sqs=column("exp_avg_sq"),
            max_exp_avg_sqs=column("max_exp_avg_sq") if group["amsgrad"] else [],
            steps=column("step"),
        )
        _compat.foreach_adam(group, lists)  # advances the steps


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019): the decay shrinks the weights directly.

    Arguments, state and errors as in Adam; weight_decay is 0.01 by default, as in torch.

    >>> import torch, zoptim
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = zoptim.AdamW(model.parameters(), lr=0.1, state_dtype="8bit")
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
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
        state_dtype: torch.dtype | str | None = None,
        split_master: bool = False,
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
            state_dtype=state_dtype,
            split_master=split_master,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # as in torch: AdamW stays AdamW if Adam wrote the state
            group["decoupled_weight_decay"] = True


def check_adam(options: Mapping[str, Any]) -> None:
    """Check the options of Adam and AdamW (one merged parameter group)."""
    check_common(options)
    check_betas(options)
    number("eps", options["eps"], 0)
    for name in ("amsgrad", "decoupled_weight_decay", "bias_correction"):
        flag(name, options[name])
