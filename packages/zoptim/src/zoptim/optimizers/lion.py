"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2): sign updates, one moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zoptim.backends.contract import Flag, Hyper, flags_of
from zoptim.optimizers.base import Params, check_betas, check_common
from zoptim.optimizers.flat import FlatOptimizer
from zoptim.rules.elementwise import lion_rule
from zoptim.states.spec import StateSpec

__all__ = ["Lion"]


class Lion(FlatOptimizer):
    """Lion (Chen et al. 2023): every element moves by lr against the sign of an interpolated gradient.

    lr >= 0, a third to a tenth of AdamW's; betas in [0, 1): the interpolation factors of the step and of the moment
    (0.9, 0.99 in the paper; 0.9, 0.999 in DeepSpeed); weight_decay >= 0, decoupled, three to ten times AdamW's.  For
    `state_dtype`, `split_master`, `fused` and `foreach` see FlatOptimizer.

    State of a parameter: `exp_avg` of its shape and device; a `step` if rounding is stochastic.

    Raises ValueError or TypeError naming the argument that is out of range.

    >>> import torch, zoptim
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([0.1, -5.0])
    >>> zoptim.Lion([weight], lr=0.25).step()
    >>> weight.data
    tensor([0.7500, 1.2500])
    """

    _rule = "lion"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        split_master: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "state_dtype": state_dtype,
            "split_master": split_master,
        }
        super().__init__(params, defaults)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_lion(options)

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec:
        return self._make_state_spec(group, ("exp_avg",), counts=False)

    def _flags(self, group: Mapping[str, Any]) -> int:
        return flags_of({Flag.DECOUPLED: True, Flag.MAXIMIZE: group["maximize"]})

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        beta1, beta2 = group["betas"]
        return Hyper(lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"])

    def _evaluate(
        self, group: Mapping[str, Any], param: Tensor, grad: Tensor, moments: dict[str, Tensor], step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        new, mean = lion_rule(
            param,
            grad,
            moments["exp_avg"],
            lr=float(group["lr"]),
            betas=group["betas"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )
        return new, {"exp_avg": mean}


def check_lion(options: Mapping[str, Any]) -> None:
    """Check the options of Lion (one merged parameter group)."""
    check_common(options)
    check_betas(options)
