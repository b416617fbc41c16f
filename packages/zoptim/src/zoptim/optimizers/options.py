"""Checks of the options that optimizers share; each optimizer checks its own in its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zoptim.checks import flag, number, optional_flag
from zoptim.states.formats import StateFormat

__all__ = ["check_betas", "check_common", "check_lr"]


def check_common(options: Mapping[str, Any]) -> None:
    """Return what every optimizer here has."""
    check_lr(options["lr"])
    number("weight_decay", options["weight_decay"], 0)
    for name in ("maximize", "split_master"):
        flag(name, options[name])
    StateFormat.parse(options["state_dtype"])
    fused = optional_flag("fused", options["fused"])
    foreach = optional_flag("foreach", options["foreach"])
    if fused and foreach:
        raise ValueError("fused=True and foreach=True; choose one, or leave both None.")


def check_betas(options: Mapping[str, Any]) -> None:
    betas = options["betas"]
    if isinstance(betas, (str, Tensor)) or not hasattr(betas, "__len__") or len(betas) != 2:
        raise TypeError(f"betas is {betas!r}; it must be two numbers in [0, 1), such as (0.9, 0.999).")
    for position, beta in enumerate(betas):
        number(f"betas[{position}]", beta, 0, 1)


def check_lr(lr: Any) -> None:
    """A number >= 0 (0 freezes the weights, moments go on) or a tensor of one such element."""
    if not isinstance(lr, Tensor):
        number("lr", lr, 0)
    elif lr.numel() != 1:
        raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; it must have exactly one element.")
    else:
        number("lr", float(lr), 0)
