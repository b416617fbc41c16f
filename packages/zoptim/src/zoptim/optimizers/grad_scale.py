"""Adapter that gives any torch optimizer the grad_scale / found_inf attributes.

A training loop then unscales, clips and skips in one way.  zoptim's optimizers and torch's fused ones read both
attributes inside their kernels; for others the adapter divides the gradients by one foreach call before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import Tensor

from zoptim import _compat
from zoptim.backends.signals import Signals, read_signals
from zoptim.optimizers.flat import FlatOptimizer

__all__ = ["AcceptsGradScale", "GradScaled", "accept_grad_scale", "supports_grad_scale"]


class AcceptsGradScale(Protocol):
    """An optimizer as the training loop sees it."""

    grad_scale: Tensor | None  # gradients are divided by it; one element; None divides nothing
    found_inf: Tensor | None  # non-zero: the step changes nothing

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def step(self, closure: Callable[[], Any] | None = None) -> Any: ...


def supports_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer.step()` itself reads the attributes grad_scale and found_inf.

    True for zoptim's optimizers, and for torch's while all their groups are fused.
    """
    if isinstance(optimizer, FlatOptimizer):
        return True
    declared = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(declared) and all(group.get("fused", True) for group in optimizer.param_groups)


def accept_grad_scale(optimizer: torch.optim.Optimizer) -> AcceptsGradScale:
    """Return `optimizer` behind the interface AcceptsGradScale.  Raises TypeError unless it is a torch optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer.")
    return _Forwarded(optimizer) if isinstance(optimizer, FlatOptimizer) else GradScaled(optimizer)


@final
class GradScaled:
    """Adapter of a torch optimizer to grad_scale and found_inf.

    found_inf is read on the host and a skipped step never calls the optimizer: torch's fused kernels skip only for
    exactly 1.0, and its fused SGD leaves uninitialized momentum after a skipped first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Divide the gradients in place, then step; return the optimizer's result, or None for a skipped step.

        The optimizer calls the closure as usual; after each call the new gradients are divided before the optimizer
        reads them.
        """
        signals = read_signals(self.grad_scale, self.found_inf)
        if signals.found_inf is not None and bool(signals.found_inf):
            return None
        if signals.grad_scale is None:
            return _step(self.optimizer, closure)
        if supports_grad_scale(self.optimizer) and signals.grad_scale.dtype is torch.float32:
            return self._step_fused(signals, closure)  # the fused kernels read float32
        if closure is not None:
            return _step(self.optimizer, lambda: self._divide_after(closure, signals))
        self._divide(signals)
        return self.optimizer.step()

    def _step_fused(self, signals: Signals, closure: Callable[[], Any] | None) -> Any:
        optimizer: Any = self.optimizer
        optimizer.grad_scale = signals.grad_scale
        try:
            return _step(optimizer, closure)
        finally:
            del optimizer.grad_scale

    def _divide_after(self, closure: Callable[[], Any], signals: Signals) -> Any:
        loss = closure()
        self._divide(signals)
        return loss

    @torch.no_grad()
    def _divide(self, signals: Signals) -> None:
        """Divide all gradients in place, the dense ones of a device by one foreach call."""
        assert signals.grad_scale is not None
        grads = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        for device in dict.fromkeys(grad.device for grad in grads):
            divisor = signals.grad_scale.to(device)
            here = [grad for grad in grads if grad.device == device]
            _compat.divide_([grad for grad in here if grad.layout is torch.strided], divisor)
            for grad in here:
                if grad.layout is not torch.strided:
                    grad.div_(divisor)


@final
class _Forwarded:
    """Adapter of a FlatOptimizer; the attributes are the optimizer's own."""

    def __init__(self, optimizer: FlatOptimizer) -> None:
        self.optimizer = optimizer

    @property
    def grad_scale(self) -> Tensor | None:
        return self.optimizer.grad_scale

    @grad_scale.setter
    def grad_scale(self, value: Tensor | None) -> None:
        self.optimizer.grad_scale = value

    @property
    def found_inf(self) -> Tensor | None:
        return self.optimizer.found_inf

    @found_inf.setter
    def found_inf(self, value: Tensor | None) -> None:
        self.optimizer.found_inf = value

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.optimizer.step(closure)


def _step(optimizer: Any, closure: Callable[[], Any] | None) -> Any:
    """Pass a closure only if there is one: optimizers outside torch.optim may not accept it."""
    return optimizer.step() if closure is None else optimizer.step(closure)
