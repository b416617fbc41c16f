"""The two scalars that travel with a step: what the gradients are divided by, and whether to do nothing.

torch.amp.GradScaler and torch's fused optimizers speak the same two attributes, `grad_scale` and `found_inf`.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = ["NO_SCALE", "Signals", "beside", "is_skipped", "read_signals"]

# What a step divides by when nobody set a grad_scale.  Not None: torch.amp.GradScaler multiplies its
# own scale with the attribute it finds.  Known by identity, so nothing is divided.
NO_SCALE = torch.ones(())

_DIVISORS = (torch.float32, torch.float64)  # the latter for float64 gradients; kernels read it as float32


@attrs.frozen(eq=False)
class Signals:
    """The two scalars that travel with a step.  () float32 on the tensors' device, or None."""

    grad_scale: Tensor | None = None  # gradients are divided by it; float64 where parameters are
    found_inf: Tensor | None = None  # not 0 means: change nothing


def read_signals(grad_scale: Any, found_inf: Any) -> Signals:
    """The optimizer's two attributes: () float32 each, or None; a grad_scale of float64 stays so."""
    return Signals(
        grad_scale=None if grad_scale is NO_SCALE else _scalar("grad_scale", grad_scale, _DIVISORS),
        found_inf=_scalar("found_inf", found_inf),
    )


def beside(signals: Signals, device: torch.device) -> Signals:
    """The same signals on `device`.  Copies only across devices, without waiting on an accelerator."""

    def move(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.device == device:
            return tensor
        return tensor.to(device, non_blocking=device.type != "cpu")

    return Signals(grad_scale=move(signals.grad_scale), found_inf=move(signals.found_inf))


def is_skipped(signals: Signals) -> bool:
    """found_inf as the host sees it.  Waits for the device."""
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
