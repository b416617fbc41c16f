"""`deepspeed.runtime.precision_config`: the sections `fp16` and `bf16` of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from zengine.deepspeed.runtime.config_utils import Section
from zengine.deepspeed.runtime.constants import BFLOAT16, BFLOAT16_OLD, FP16

__all__ = [
    "BFLOAT16",
    "BFLOAT16_OLD",
    "FP16",
    "DeepSpeedBF16Config",
    "DeepSpeedFP16Config",
    "get_bfloat16_config",
    "get_float16_config",
]


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the section `bf16` of a config, or `bfloat16`, its old name."""
    found = param_dict.get(BFLOAT16)
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16_OLD) or {} if found is None else found))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the section `fp16` of a config."""
    return DeepSpeedFP16Config(**(param_dict.get(FP16) or {}))


@final
class DeepSpeedBF16Config(Section):
    """Section `bf16`: CONFIG.md says what each key does."""

    enabled: bool
    immediate_grad_update: bool
    check_grad_overflow: bool
    bf16_master_weights_and_grads: bool
    bf16_optimizer_states: bool

    DEFAULTS = {  # noqa: RUF012
        "enabled": False,
        "immediate_grad_update": False,
        "check_grad_overflow": True,
        "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
    }


def _scale_problem(value: Any) -> str:
    if isinstance(value, bool):
        return "fp16.loss_scale must be a number, not bool"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return "fp16.loss_scale must be a number"
    if not math.isfinite(number):
        return "fp16.loss_scale must be a finite number (not inf/-inf/nan)"
    return "fp16.loss_scale must be >= 0 (0 enables dynamic loss scaling)" if number < 0 else ""


def _count_problem(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"fp16.{name} must be an integer, not bool"
    if isinstance(value, float) and not math.isfinite(value):
        return f"fp16.{name} must be a finite number (not inf/-inf/nan)"
    try:
        int(value)
    except (TypeError, ValueError):
        return f"fp16.{name} must be an integer"
    return ""


@final
class DeepSpeedFP16Config(Section):
    """Section `fp16`: CONFIG.md says what each key does.

    Raises ValueError, too, for a window or a least scale that a dynamic scale cannot have.
    """

    enabled: bool
    auto_cast: bool
    loss_scale: float  # 0: dynamic
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_loss_scale: int
    fp16_master_weights_and_grads: bool

    DEFAULTS = {  # noqa: RUF012
        "enabled": False,
        "auto_cast": False,
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
        "fp16_master_weights_and_grads": False,
    }
    CHECKS = {  # noqa: RUF012
        "loss_scale": _scale_problem,
        "loss_scale_window": lambda value: _count_problem("loss_scale_window", value),
        "min_loss_scale": lambda value: _count_problem("min_loss_scale", value),
    }

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(strict, **data)
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                if getattr(self, name) <= 0:
                    raise ValueError(f"fp16.{name} must be > 0 when dynamic loss scaling is enabled (loss_scale=0)")

    def initial_dynamic_scale(self) -> int:
        """Return the first dynamic loss scale."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the arguments of DeepSpeed's DynamicLossScaler."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }
