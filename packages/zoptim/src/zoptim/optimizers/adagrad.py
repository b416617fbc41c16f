"""Adagrad (Duchi et al. 2011), drop-in for torch.optim.Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoptim.backends.contract import Flag, Hyper, flags_of
from zoptim.checks import number
from zoptim.optimizers.base import Params, check_common
from zoptim.optimizers.flat import FlatOptimizer
from zoptim.rules.elementwise import adagrad_rule
from zoptim.states.spec import StateSpec

__all__ = ["Adagrad"]

_SUM = "sum"


class Adagrad(FlatOptimizer):
    """Adagrad: lr >= 0, lr_decay >= 0, weight_decay >= 0 (added to the gradient), eps >= 0.

    `initial_accumulator_value` >= 0 is the initial sum of squares.  For `state_dtype`, `split_master`, `fused` and
    `foreach` see FlatOptimizer.

    State of a parameter, by torch's names: `step` () float32, `sum` of the parameter's shape and device.

    Raises ValueError or TypeError naming the argument that is out of range.
    """

    _rule = "adagrad"
    _absent_options: ClassVar[Mapping[str, Any]] = {**FlatOptimizer._absent_options, "initial_accumulator_value": 0.0}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        split_master: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "state_dtype": state_dtype,
            "split_master": split_master,
        }
        super().__init__(params, defaults)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_adagrad(options)

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec:
        first = group["initial_accumulator_value"]
        return self._make_state_spec(group, (_SUM,), squares=frozenset({_SUM}), counts=True, first=first)

    def _flags(self, group: Mapping[str, Any]) -> int:
        return flags_of({Flag.MAXIMIZE: group["maximize"]})

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        decay = group["weight_decay"]
        return Hyper(lr=group["lr"], beta1=group["lr_decay"], eps=group["eps"], weight_decay=decay)

    def _evaluate(
        self, group: Mapping[str, Any], param: Tensor, grad: Tensor, moments: dict[str, Tensor], step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        new, total = adagrad_rule(
            param,
            grad,
            moments[_SUM],
            step=step - 1,
            lr=float(group["lr"]),
            lr_decay=group["lr_decay"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        return new, {_SUM: total}


def check_adagrad(options: Mapping[str, Any]) -> None:
    """Check the options of Adagrad (one merged parameter group)."""
    check_common(options)
    for name in ("lr_decay", "initial_accumulator_value", "eps"):
        number(name, options[name], 0)
