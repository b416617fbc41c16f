"""Adafactor (Shazeer and Stern 2018): second moments as a row and a column, for when state must be small.

A matrix of rows x cols keeps rows + cols numbers in place of 2 * rows * cols.  The arithmetic is
torch.optim.Adafactor's, which is a loop of small products where a kernel of ours would gain nothing that its users
came for; what is added are the grad_scale / found_inf attributes, and checks of the options.

It looks at whole matrices: shards that cut them are refused by whoever cuts (`elementwise` is False).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import _compat
from .checks import check_adafactor
from .contract import Params
from .signals import NO_SCALE, beside, is_skipped, read_signals

__all__ = ["Adafactor"]


class Adafactor(torch.optim.Adafactor):
    """torch.optim.Adafactor that unscales and skips: same arguments, same state.

    lr >= 0 bounds the relative step; beta2_decay <= 0; eps (None or number, number); d > 0; weight_decay >= 0.
    A tensor lr is read on the host.  `grad_scale` and `found_inf` as in FlatOptimizer; `p.grad` is never written.

    Raises ValueError or TypeError naming the argument that is out of range.
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, unless found_inf is set; return the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        signals = read_signals(self.grad_scale, self.found_inf)
        if not is_skipped(signals):
            with self._divided(signals):
                super().step()  # type: ignore[no-untyped-call]
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
