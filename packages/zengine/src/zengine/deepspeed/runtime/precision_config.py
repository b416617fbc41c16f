"""`deepspeed.runtime.precision_config`: the sections `fp16` and `bf16` of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, final

from zengine.config.grammar.table import section_of
from zengine.config.keys.precision import BF16, Bf16, Fp16
from zengine.deepspeed.runtime.constants import BFLOAT16, BFLOAT16_OLD, FP16
from zengine.deepspeed.section_model import SectionModel

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
class DeepSpeedBF16Config(SectionModel):
    """Section `bf16`: CONFIG.md says what each key does."""

    rows = section_of(Bf16, BF16)
    defaults: ClassVar[Mapping[str, Any]] = {"immediate_grad_update": False}
    title = BFLOAT16
    enabled: bool
    immediate_grad_update: bool
    check_grad_overflow: bool
    bf16_master_weights_and_grads: bool
    bf16_optimizer_states: bool


@final
class DeepSpeedFP16Config(SectionModel):
    """Section `fp16`: CONFIG.md says what each key does.

    Numbers of the loss scale may be text, as in DeepSpeed.  Raises ValueError, too, for a window or a least scale
    that a dynamic scale cannot have.
    """

    rows = section_of(Fp16)
    title = FP16
    enabled: bool
    auto_cast: bool
    loss_scale: float  # 0: dynamic
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_loss_scale: int
    fp16_master_weights_and_grads: bool

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = {name: data.pop(name) for name in ("loss_scale", *_COUNTS) if name in data}
        numbers = {name: _number(name, value) for name, value in given.items() if strict or value != "auto"}
        super().__init__(strict, **data)
        vars(self).update({"min_loss_scale": 1, **numbers})
        self.model_fields_set |= set(numbers)
        for name in _COUNTS if self.enabled and self.loss_scale == 0 else ():
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


_COUNTS = ("loss_scale_window", "min_loss_scale")


def _number(name: str, value: Any) -> float:
    """Return a number of the loss scale, a whole one for _COUNTS.  Raises ValueError."""
    kind, noun = (int, "an integer") if name in _COUNTS else (float, "a number")
    if isinstance(value, bool):
        raise ValueError(f"fp16.{name} must be {noun}, not bool")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"fp16.{name} must be {noun}, got {value!r}") from error
    if not math.isfinite(number):
        raise ValueError(f"fp16.{name} must be a finite number (not inf/-inf/nan)")
    if kind is int and not number.is_integer():
        raise ValueError(f"fp16.{name} must be an integer, got {value!r}")
    if name == "loss_scale" and number < 0:
        raise ValueError("fp16.loss_scale must be >= 0 (0 enables dynamic loss scaling)")
    return kind(number)
