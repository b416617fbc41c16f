"""Adagrad (Duchi et al. 2011), drop-in for torch.optim.Adagrad.

Sparse gradients.  The gradient of an embedding created with sparse=True has rows.  A step copies these rows of the
weight and of its sum of squares, updates the copies by the rule, and writes them back: other rows are neither read
nor written.  Weight decay applies to these rows alone, as in DeepSpeed; torch rejects it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoptim.backends.contract import Flag, Hyper, flags_of
from zoptim.backends.signals import is_skipped, read_signals
from zoptim.checks import number
from zoptim.errors import UnsupportedTensorError
from zoptim.optimizers.base import Params, check_common
from zoptim.optimizers.flat import FlatOptimizer
from zoptim.rules.elementwise import adagrad_rule
from zoptim.states.formats import StateFormat
from zoptim.states.spec import StateSpec
from zoptim.updates.fallback import update_in_torch
from zoptim.updates.plan import Entry

__all__ = ["Adagrad"]

_SUM = "sum"


class Adagrad(FlatOptimizer):
    """Adagrad (Duchi et al. 2011): lr >= 0, lr_decay >= 0, weight_decay >= 0 (added to the gradient), eps >= 0.

    `initial_accumulator_value` >= 0 is the initial sum of squares.  For `state_dtype`, `split_master`, `fused` and
    `foreach` see FlatOptimizer.

    State of a parameter, by torch's names: `step` () float32, `sum` of the parameter's shape and device.

    Sparse gradients update their rows alone; 8-bit states, whose scales span rows, raise UnsupportedTensorError then.

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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, dense or sparse; return the closure's loss, or None.

        Raises UnsupportedTensorError for a sparse gradient with 8-bit states.
        """
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.step()
            return loss
        sparse = [
            (index, position, param, param.grad)
            for index, group in enumerate(self.param_groups)
            for position, param in enumerate(group["params"])
            if param.grad is not None and param.grad.is_sparse
        ]
        if not sparse:
            return super().step()
        for index, position, _, _ in sparse:
            if StateFormat.parse(self.param_groups[index]["state_dtype"]) is StateFormat.INT8:
                raise UnsupportedTensorError(
                    f"the gradient of {self._name(index, position)} is sparse, and a scale of 8-bit states spans "
                    'several rows. Use state_dtype="bf16", or build the embedding with sparse=False.'
                )
        try:
            for _, _, param, _ in sparse:
                param.grad = None
            super().step()  # the dense ones
        finally:
            for _, _, param, grad in sparse:
                param.grad = grad
        with torch.no_grad():
            for index, position, _, grad in sparse:
                self._update_rows(index, position, grad.coalesce())
        return None

    def _update_rows(self, index: int, position: int, grad: Tensor) -> None:
        """Update the rows of one parameter that its coalesced sparse gradient has."""
        group = self.param_groups[index]
        param = group["params"][position].detach()
        signals = read_signals(self.grad_scale, self.found_inf)
        if is_skipped(signals):
            return
        state = self._ready_state(index, position)
        rows = tuple(grad.indices())
        shaped = [key for key, value in state.items() if isinstance(value, Tensor) and value.shape == param.shape]
        copies = {**state, **{key: state[key][rows] for key in shaped}}
        entry = Entry(param[rows], grad.values(), copies, position)
        update_in_torch(self, group, [entry], signals)
        param[rows] = entry.param
        for key in shaped:
            state[key][rows] = copies[key]
        if (weight := self._mirrors.get(group["params"][position])) is not None:
            weight.detach()[rows] = entry.param.to(weight.dtype)

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
