"""Ranges of hyperparameters, checked where they are given rather than where they hurt.

A negative learning rate or an `"1e-3"` that YAML read as text must fail at construction, with the
argument's name in the message; in the update it would be a wrong curve or an error from a kernel.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["check_adam", "check_sgd", "flag", "integer", "number", "optional_flag"]


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a float if it is a finite number in [low, high); else TypeError or ValueError."""
    allowed = _interval(low, high)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a number in {allowed}.")
    real = float(value)
    if not math.isfinite(real) or not low <= real < high:
        raise ValueError(f"{name} is {value!r}; it must be a number in {allowed}.")
    return real


def integer(name: str, value: Any, low: int = 0) -> int:
    """`value` as an int if it is whole (1000.0, as JSON writes 1e3, counts) and >= low."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a whole number >= {low}.")
    whole = float(value)
    if not whole.is_integer() or whole < low:
        raise ValueError(f"{name} is {value!r}; it must be a whole number >= {low}.")
    return int(whole)


def flag(name: str, value: Any) -> bool:
    """`value` if it is True or False; else TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be True or False.")
    return value


def optional_flag(name: str, value: Any) -> bool | None:
    """`value` if it is True, False or None (None: zoptim chooses)."""
    return None if value is None else flag(name, value)


def check_adam(options: Mapping[str, Any]) -> None:
    """Refuse options of Adam and AdamW (one merged parameter group) that are out of range."""
    _learning_rate(options["lr"])
    betas = options["betas"]
    if isinstance(betas, (str, Tensor)) or not hasattr(betas, "__len__") or len(betas) != 2:
        raise TypeError(f"betas is {betas!r}; it must be two numbers in [0, 1), such as (0.9, 0.999).")
    for position, beta in enumerate(betas):
        number(f"betas[{position}]", beta, 0, 1)
    number("eps", options["eps"], 0)
    number("weight_decay", options["weight_decay"], 0)
    for name in ("amsgrad", "maximize", "decoupled_weight_decay", "bias_correction"):
        flag(name, options[name])
    _kernel_choice(options)


def check_sgd(options: Mapping[str, Any]) -> None:
    """Refuse options of SGD (one merged parameter group) that are out of range or contradictory."""
    _learning_rate(options["lr"])
    momentum = number("momentum", options["momentum"], 0)
    dampening = number("dampening", options["dampening"])
    number("weight_decay", options["weight_decay"], 0)
    flag("maximize", options["maximize"])
    if flag("nesterov", options["nesterov"]) and (momentum == 0 or dampening != 0):
        raise ValueError(
            f"nesterov=True with momentum {momentum} and dampening {dampening}; "
            "Nesterov needs momentum > 0 and dampening 0."
        )
    _kernel_choice(options)


def _learning_rate(lr: Any) -> None:
    """A number >= 0 (0 freezes the weights, moments go on) or a tensor of one such element."""
    if not isinstance(lr, Tensor):
        number("lr", lr, 0)
    elif lr.numel() != 1:
        raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; it must have exactly one element.")
    else:
        number("lr", float(lr), 0)


def _kernel_choice(options: Mapping[str, Any]) -> None:
    fused = optional_flag("fused", options["fused"])
    foreach = optional_flag("foreach", options["foreach"])
    if fused and foreach:
        raise ValueError("fused=True and foreach=True; choose one, or leave both None.")


def _interval(low: float, high: float) -> str:
    left = "(-inf" if low == -math.inf else f"[{low:g}"
    return f"{left}, {high:g})"
