"""The two scalars of a step: `grad_scale`, the divisor of the gradients, and `found_inf`, which skips the step.

They are the protocol of torch.amp.GradScaler and torch's fused optimizers.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = ["NO_SCALE", "Signals", "is_skipped", "read_signals", "signals_on"]

# The default grad_scale.  Not None, because torch.amp.GradScaler multiplies its own scale with the attribute.
# Recognized by identity: no division happens.
NO_SCALE = torch.ones(())

_DIVISORS = (torch.float32, torch.float64)  # the latter for float64 gradients; kernels read it as float32


@attrs.frozen(eq=False)
class Signals:
    """grad_scale and found_inf: () float32 on the tensors' device, or None."""

    grad_scale: Tensor | None = None  # gradients are divided by it; float64 where parameters are
    found_inf: Tensor | None = None  # non-zero: the step changes nothing


def read_signals(grad_scale: Any, found_inf: Any) -> Signals:
    """Convert the optimizer's two attributes to () float32, or None; a float64 grad_scale stays float64.

    Raises TypeError for anything but a tensor of one element or None.
    """
    return Signals(
        grad_scale=None if grad_scale is NO_SCALE else _scalar("grad_scale", grad_scale, _DIVISORS),
        found_inf=_scalar("found_inf", found_inf),
    )


def signals_on(signals: Signals, device: torch.device) -> Signals:
    """Return the signals on `device`, copied if they are on another one; never waits for an accelerator."""

    given = signals.grad_scale, signals.found_inf
    if all(tensor is None or tensor.device == device for tensor in given):
        return signals

    def move(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.device == device:
            return tensor
        return tensor.to(device, non_blocking=device.type != "cpu")

    return Signals(grad_scale=move(signals.grad_scale), found_inf=move(signals.found_inf))


def is_skipped(signals: Signals) -> bool:
    """Return whether found_inf is set.  Synchronizes with its device."""
    return signals.found_inf is not None and bool(signals.found_inf)


def _scalar(name: str, value: Any, kept: tuple[torch.dtype, ...] = (torch.float32,)) -> Tensor | None:
    if value is None:
        return None
    if not (isinstance(value, Tensor) and value.numel() == 1):
        raise TypeError(f"{name} is {value!r}; it must be a tensor of one element, or None.")
    tensor: Tensor = value
    if tensor.dim() or tensor.dtype not in kept or tensor.requires_grad:
        tensor = tensor.detach().reshape(())
        return tensor if tensor.dtype in kept else tensor.float()
    return tensor
