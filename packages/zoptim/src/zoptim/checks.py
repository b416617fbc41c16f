"""Ranges of hyperparameters, checked where they are given rather than where they hurt.

A negative learning rate or an `"1e-3"` that YAML read as text must fail at construction, with the
argument's name in the message; in the update it would be a wrong curve or an error from a kernel.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .formats import StateFormat

__all__ = [
    "check_adafactor",
    "check_adagrad",
    "check_adam",
    "check_lamb",
    "check_lion",
    "check_muon",
    "check_sgd",
    "flag",
    "integer",
    "number",
    "optional_flag",
]


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a float if it is a finite number in [low, high); else TypeError or ValueError."""
    allowed = _interval(low, high)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a number in {allowed}.")
    exact: Any = value  # an int may be beyond every float
    if not max(low, -sys.float_info.max) <= exact <= sys.float_info.max or not exact < high:  # NaN neither
        raise ValueError(f"{name} is {value!r}; it must be a number in {allowed}.")
    return float(value)


def integer(name: str, value: Any, low: int = 0) -> int:
    """`value` as an int if it is whole (1000.0, as JSON writes 1e3, counts) and >= low."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a whole number >= {low}.")
    exact: Any = value
    if exact % 1 != 0 or exact < low:  # NaN and infinity too
        raise ValueError(f"{name} is {value!r}; it must be a whole number >= {low}.")
    return int(exact)


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
    _common(options)
    _betas(options)
    number("eps", options["eps"], 0)
    for name in ("amsgrad", "decoupled_weight_decay", "bias_correction"):
        flag(name, options[name])


def check_lion(options: Mapping[str, Any]) -> None:
    """Refuse options of Lion (one merged parameter group) that are out of range."""
    _common(options)
    _betas(options)


def check_adagrad(options: Mapping[str, Any]) -> None:
    """Refuse options of Adagrad (one merged parameter group) that are out of range."""
    _common(options)
    for name in ("lr_decay", "initial_accumulator_value", "eps"):
        number(name, options[name], 0)


def check_lamb(options: Mapping[str, Any]) -> None:
    """Refuse options of LAMB (one merged parameter group) that are out of range or contradictory."""
    _common(options)
    _betas(options)
    number("eps", options["eps"], 0)
    for name in ("bias_correction", "eps_inside_sqrt"):
        flag(name, options[name])
    if StateFormat.parse(options["state_dtype"]) is StateFormat.FP16:
        raise ValueError(
            "state_dtype is fp16; LAMB takes fp32, bf16 and 8bit, because float16 rounds small second moments to 0."
        )
    low = number("min_coeff", options["min_coeff"], 0)
    if number("max_coeff", options["max_coeff"], 0) < low:
        raise ValueError(f"max_coeff is {options['max_coeff']!r}, below min_coeff {low:g}; it must not be.")


def check_adafactor(options: Mapping[str, Any]) -> None:
    """Refuse options of Adafactor that are out of range."""
    _learning_rate(options["lr"])
    number("weight_decay", options["weight_decay"], 0)
    if number("beta2_decay", options["beta2_decay"]) > 0:
        raise ValueError(f"beta2_decay is {options['beta2_decay']!r}; it must be at most 0.")
    number("d", options["d"], 1)
    eps = options["eps"]
    if not isinstance(eps, (tuple, list)) or len(eps) != 2:
        raise TypeError(f"eps is {eps!r}; it must be two numbers, such as (None, 1e-3).")
    for position, value in enumerate(eps):
        if position or value is not None:
            number(f"eps[{position}]", value, 0)


def check_muon(options: Mapping[str, Any]) -> None:
    """Refuse options that Muon has beside Adam's (one merged parameter group) and that are out of range."""
    number("momentum", options["momentum"], 0, 1)
    integer("ns_steps", options["ns_steps"], 1)
    for name in ("nesterov", "use_muon"):
        flag(name, options[name])
    for name, allowed in (("ns_method", ("standard", "gram")), ("adjust_lr", ("original", "match_rms_adamw"))):
        if options[name] not in allowed:
            raise ValueError(f"{name} is {options[name]!r}; it must be one of {', '.join(map(repr, allowed))}.")


def check_sgd(options: Mapping[str, Any]) -> None:
    """Refuse options of SGD (one merged parameter group) that are out of range or contradictory."""
    _common(options)
    momentum = number("momentum", options["momentum"], 0)
    dampening = number("dampening", options["dampening"])
    if flag("nesterov", options["nesterov"]) and (momentum == 0 or dampening != 0):
        raise ValueError(
            f"nesterov=True with momentum {momentum} and dampening {dampening}; "
            "Nesterov needs momentum > 0 and dampening 0."
        )


def _common(options: Mapping[str, Any]) -> None:
    """What every optimizer here has."""
    _learning_rate(options["lr"])
    number("weight_decay", options["weight_decay"], 0)
    for name in ("maximize", "split_master"):
        flag(name, options[name])
    StateFormat.parse(options["state_dtype"])
    fused = optional_flag("fused", options["fused"])
    foreach = optional_flag("foreach", options["foreach"])
    if fused and foreach:
        raise ValueError("fused=True and foreach=True; choose one, or leave both None.")


def _betas(options: Mapping[str, Any]) -> None:
    betas = options["betas"]
    if isinstance(betas, (str, Tensor)) or not hasattr(betas, "__len__") or len(betas) != 2:
        raise TypeError(f"betas is {betas!r}; it must be two numbers in [0, 1), such as (0.9, 0.999).")
    for position, beta in enumerate(betas):
        number(f"betas[{position}]", beta, 0, 1)


def _learning_rate(lr: Any) -> None:
    """A number >= 0 (0 freezes the weights, moments go on) or a tensor of one such element."""
    if not isinstance(lr, Tensor):
        number("lr", lr, 0)
    elif lr.numel() != 1:
        raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; it must have exactly one element.")
    else:
        number("lr", float(lr), 0)


def _interval(low: float, high: float) -> str:
    left = "(-inf" if low == -math.inf else f"[{low:g}"
    return f"{left}, {high:g})"
