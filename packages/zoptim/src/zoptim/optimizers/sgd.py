"""Stochastic gradient descent with momentum, drop-in for torch.optim.SGD.

[Note: the first momentum] torch initializes the buffer with the gradient itself, so a missing buffer means "first
update".  torch's fused path creates the buffer before it reads found_inf, so a skipped first step leaves
uninitialized memory in it; here a skipped first step creates no buffer.  The cost: the first update of a parameter
takes the torch path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoptim import _compat
from zoptim._compat import SgdLists
from zoptim.backends.contract import Flag, Hyper, flags_of
from zoptim.backends.signals import Signals
from zoptim.checks import flag, number
from zoptim.optimizers.base import Params, check_common
from zoptim.optimizers.flat import FlatOptimizer
from zoptim.rules.elementwise import sgd_rule
from zoptim.states.spec import StateSpec
from zoptim.updates.fallback import fits_foreach
from zoptim.updates.plan import Entry

__all__ = ["SGD"]

_BUFFER = "momentum_buffer"


class SGD(FlatOptimizer):
    """SGD: lr >= 0 (a number, or a tensor of one element), momentum >= 0, dampening, weight_decay >= 0.

    `nesterov` needs momentum > 0 and dampening 0.  For `state_dtype`, `split_master`, `fused` and `foreach` see
    FlatOptimizer.

    State of a parameter: torch's `momentum_buffer` of the parameter's shape and device, created by the first update
    and only with momentum; a `step` if rounding is stochastic.

    Raises ValueError or TypeError naming the argument that is out of range.

    >>> import torch, zoptim
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.ones(2)
    >>> zoptim.SGD([weight], lr=0.5).step()
    >>> weight.data
    tensor([0.5000, 0.5000])
    """

    _rule = "sgd"
    _absent_options: ClassVar[Mapping[str, Any]] = {**FlatOptimizer._absent_options, "nesterov": False}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        split_master: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "state_dtype": state_dtype,
            "split_master": split_master,
        }
        super().__init__(params, defaults)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        check_sgd(options)

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec:
        names = (_BUFFER,) if group["momentum"] else ()
        return self._make_state_spec(group, names, lazy=frozenset(names), counts=False)

    def _flags(self, group: Mapping[str, Any]) -> int:
        return flags_of({Flag.NESTEROV: group["nesterov"], Flag.MAXIMIZE: group["maximize"]})

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        return Hyper(
            lr=group["lr"],
            beta1=group["momentum"],
            beta2=group["dampening"],
            weight_decay=group["weight_decay"],
        )

    def _evaluate(
        self, group: Mapping[str, Any], param: Tensor, grad: Tensor, moments: dict[str, Tensor], step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        new, buffer = sgd_rule(
            param,
            grad,
            moments.get(_BUFFER),
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        return new, {} if buffer is None else {_BUFFER: buffer}

    def _update_in_torch(self, group: Mapping[str, Any], entries: list[Entry], signals: Signals) -> None:
        param = entries[0].param
        if not fits_foreach(entries) or self._state_spec(group).dtype_for(param) is not param.dtype:
            super()._update_in_torch(group, entries, signals)
            return
        without_buffer = [entry for entry in entries if _BUFFER not in entry.state]
        with_buffer = [entry for entry in entries if _BUFFER in entry.state]
        for some, first in ((without_buffer, True), (with_buffer, False)):
            grads = _compat.divide([entry.grad for entry in some], signals.grad_scale)
            kept = [entry.state[_BUFFER] for entry in some] if group["momentum"] and not first else []
            if some:
                buffers = _compat.foreach_sgd(group, SgdLists([entry.param for entry in some], grads, kept, first))
                for entry, buffer in zip(some, buffers):
                    entry.state[_BUFFER] = buffer


def check_sgd(options: Mapping[str, Any]) -> None:
    """Check the options of SGD (one merged parameter group)."""
    check_common(options)
    momentum = number("momentum", options["momentum"], 0)
    dampening = number("dampening", options["dampening"])
    if flag("nesterov", options["nesterov"]) and (momentum == 0 or dampening != 0):
        raise ValueError(
            f"nesterov=True with momentum {momentum} and dampening {dampening}; "
            "Nesterov needs momentum > 0 and dampening 0."
        )
