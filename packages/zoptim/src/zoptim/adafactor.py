"""Adafactor (Shazeer and Stern 2018): second moments as a row and a column, for when state must be small.

A matrix of rows x cols keeps rows + cols numbers in place of 2 * rows * cols.  The arithmetic is
torch.optim.Adafactor's, which is a loop of small products where a kernel of ours would gain nothing that its users
came for; what is added are the grad_scale / found_inf attributes, and checks of the options.

It looks at whole matrices: shards that cut them are refused by whoever cuts (`elementwise` is False).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import _compat
from .checks import check_adafactor
from .contract import Params
from .errors import UnsupportedTensorError
from .signals import NO_SCALE, beside, is_skipped, read_signals

__all__ = ["Adafactor"]


class Adafactor(torch.optim.Adafactor):
    """torch.optim.Adafactor that unscales and skips: same arguments, same state.

    lr >= 0 bounds the relative step; beta2_decay <= 0; eps (None or number, number); d >= 1; weight_decay >= 0.
    A tensor lr is read on the host.  `grad_scale` and `found_inf` as in FlatOptimizer; `p.grad` is never written.

    Raises ValueError or TypeError naming the argument that is out of range, UnsupportedTensorError for complex
    parameters.
    """

    grad_scale: Tensor | None = NO_SCALE
    found_inf: Tensor | None = None
    _step_supports_amp_scaling = True
    elementwise: ClassVar[bool] = False

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        check_adafactor({"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay})
        super().__init__(params, lr, beta2_decay, eps, d, weight_decay, foreach=foreach, maximize=maximize)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; its options are checked like the constructor's."""
        if isinstance(param_group, dict):
            check_adafactor({**self.defaults, **param_group})
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        for position, param in enumerate(self.param_groups[index]["params"]):
            if param.is_complex():
                self.param_groups.pop()
                raise UnsupportedTensorError(
                    f"parameter {position} of group {index} is complex ({param.dtype}); Adafactor takes real "
                    "tensors. Train torch.view_as_real(parameter)."
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Adopt loaded groups and state.  Raises ValueError, with nothing adopted, for what does not fit."""
        previous = dict(self.__dict__)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        try:
            for index, group in enumerate(self.param_groups):
                _check_group(group, index, self.defaults)
                for position, param in enumerate(group["params"]):
                    _check_state(self.state.get(param, {}), param, f"parameter {position} of group {index}")
        except (TypeError, ValueError):
            self.__dict__.update(previous)
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, unless found_inf is set; return the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        signals = read_signals(self.grad_scale, self.found_inf)
        if not is_skipped(signals):
            with self._divided(signals):
                _compat.unhooked_step(torch.optim.Adafactor)(self)
        return loss

    @contextmanager
    def _divided(self, signals: _compat.Signals) -> Iterator[None]:
        """Lets torch see divided gradients, and puts the others back.  torch would refuse the attributes."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        kept = [p.grad for p in params]
        scale, found = self.grad_scale, self.found_inf
        try:
            if signals.grad_scale is not None:
                for p in params:
                    p.grad = p.grad / beside(signals, p.device).grad_scale
            self.grad_scale = self.found_inf = None
            yield
        finally:
            self.grad_scale, self.found_inf = scale, found
            for p, grad in zip(params, kept):
                p.grad = grad


def _check_group(group: Mapping[str, Any], index: int, defaults: Mapping[str, Any]) -> None:
    # torch itself adds "differentiable" to the defaults whenever it loads.
    missing = [option for option in defaults if option not in group and option != "differentiable"]
    if missing:
        raise ValueError(
            f"the loaded group {index} lacks the options {', '.join(missing)} of Adafactor. It was written by "
            "another optimizer."
        )
    check_adafactor(group)


def _check_state(state: Mapping[str, Any], param: Tensor, who: str) -> None:
    """ValueError unless `state` is none, or what Adafactor remembers of `param`."""
    for key, shape in _expected_shapes(param).items() if state else ():
        if key not in state:
            raise ValueError(f"the loaded state of {who} lacks {key}; it has {', '.join(state)}.")
        if state[key].shape != shape:
            raise ValueError(
                f"{key} of {who} has shape {tuple(state[key].shape)}, where {shape} belongs to the parameter's "
                f"{tuple(param.shape)}. Load the state of this model."
            )


def _expected_shapes(param: Tensor) -> dict[str, tuple[int, ...]]:
    """Of the moments of `param`."""
    if param.dim() < 2:
        return {"variance": tuple(param.shape)}
    *stack, rows, cols = param.shape
    return {"row_var": (*stack, rows, 1), "col_var": (*stack, 1, cols)}
