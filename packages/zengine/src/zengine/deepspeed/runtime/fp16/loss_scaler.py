"""`deepspeed.runtime.fp16.loss_scaler`: loss scales over zprecision's scalers.

`optimizer.loss_scaler` of an engine is one of these over the engine's own scaler: it shows the scale that the next
loss gets.  One that you make scales a loop of your own.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import zprecision

__all__ = [
    "CONSECUTIVE_HYSTERESIS",
    "DELAYED_SHIFT",
    "INITIAL_LOSS_SCALE",
    "LOSS_SCALE_PROFILE_INITIAL",
    "MIN_LOSS_SCALE",
    "SCALE_WINDOW",
    "CreateLossScaler",
    "DynamicLossScaler",
    "LossScaleConfig",
    "LossScaleProfile",
    "LossScaler",
    "LossScalerBase",
    "loss_scaler_over",
    "to_python_float",
]

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


class LossScaleProfile(str, enum.Enum):
    """Kinds of DeepSpeed's half-precision optimizers, which have other defaults."""

    FUSED = "fused"
    UNFUSED = "unfused"


LOSS_SCALE_PROFILE_INITIAL = {LossScaleProfile.FUSED: 2.0**32, LossScaleProfile.UNFUSED: 2.0**16}
_PROFILE_MINIMUM = {LossScaleProfile.FUSED: 1.0, LossScaleProfile.UNFUSED: 0.25}


def to_python_float(t: Any) -> float:
    """Return the number in a tensor of one element, or the first one of a sequence."""
    return float(t.item() if hasattr(t, "item") else t[0])


class LossScalerBase:
    """Loss scale over a scaler of zprecision."""

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        """Make a constant scale; greater than 0."""
        self.scaler: zprecision.Scaler = zprecision.make_scaler(zprecision.StaticScaling(float(cur_scale)), "cpu")

    @property
    def cur_scale(self) -> float:
        """Factor of the next loss."""
        return float(self.scaler.factor)

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        if not isinstance(self.scaler, zprecision.DynamicScaler):
            raise AttributeError("cur_scale of a constant loss scale is set by the config: fp16.loss_scale")
        self.scaler.load_state_dict({**self.scaler.state_dict(), "factor": float(value)})

    @property
    def loss_scale(self) -> float:
        """`cur_scale`."""
        return self.cur_scale

    def scale_gradient(self, module: nn.Module, grad_in: Iterable[Tensor], grad_out: object) -> tuple[Tensor, ...]:
        """Return the gradients times the scale: a backward hook of a module."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """End a step; overflow: its gradients were not finite."""
        self.scaler.update(torch.tensor(float(overflow)))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, in float32 for a float16 one."""
        return self.scaler.scale(loss)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Call backward of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class LossScaler(LossScalerBase):
    """Constant loss scale."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: a constant scale does not look."""
        return False


class DynamicLossScaler(LossScalerBase):
    """Loss scale that grows after `scale_window` clean steps and halves when overflows use up the hysteresis.

    Raises ValueError for numbers out of range.
    """

    dynamic = True
    scale_factor = 2.0

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        rule = zprecision.DynamicScaling(
            initial=float(init_scale),
            window=scale_window,
            hysteresis=delayed_shift,
            consecutive_hysteresis=consecutive_hysteresis,
            floor=float(min_scale),
        )
        self._set(zprecision.DynamicScaler(rule))
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype

    def _set(self, scaler: zprecision.DynamicScaler) -> None:
        self.scaler = scaler
        self.cur_iter = 0  # steps
        self.last_overflow_iter = -1  # number of the last step that overflowed
        rule = scaler.rule
        self.scale_window, self.min_scale = rule.window, rule.floor
        self.delayed_shift, self.consecutive_hysteresis = rule.hysteresis, rule.consecutive_hysteresis

    @property
    def cur_hysteresis(self) -> int:
        """At 1 the next overflow lowers the scale."""
        return int(self.scaler.state_dict()["hysteresis_left"])

    def update_scale(self, overflow: bool) -> None:
        """End a step.

        Raises OverflowError at an overflow while the scale is at its minimum, unless `raise_error_at_min_scale` is
        False.
        """
        if overflow and self.raise_error_at_min_scale and self.scaler.at_floor:
            raise OverflowError(
                f"the loss scale is at its minimum, {self.min_scale:g}, and the gradients still overflow. Lower the "
                "learning rate or min_scale, or train in bf16."
            )
        super().update_scale(overflow)
        self.count(overflow)

    def count(self, overflow: bool) -> None:
        """Count a step whose scale was updated elsewhere."""
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Return True if a gradient of `params` is not finite."""
        from zengine.deepspeed.runtime.gradients import has_inf_or_nan  # of sparse gradients, too

        return any(param.grad is not None and bool(has_inf_or_nan(param.grad)) for param in params)


def loss_scaler_over(scaler: zprecision.Scaler) -> LossScaler | DynamicLossScaler:
    """Return the loss scale that shows an engine's scaler."""
    if not isinstance(scaler, zprecision.DynamicScaler):
        constant = LossScaler()
        constant.scaler = scaler
        return constant
    made = DynamicLossScaler.__new__(DynamicLossScaler)
    made._set(scaler)
    made.raise_error_at_min_scale, made.dtype = True, torch.half
    return made


def CreateLossScaler(  # noqa: N802 - DeepSpeed's name
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScalerBase:
    """Return the loss scale for gradients in `dtype`: 1 unless that is float16."""
    if dtype == torch.half and dynamic_scaling:
        assert dynamic_loss_args is not None, (
            "a dynamic loss scale needs dynamic_loss_args: init_scale, scale_window, ..."
        )
        return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)
    return LossScaler(static_loss_scale if dtype == torch.half else 1.0)


class LossScaleConfig:
    """Numbers of a loss scale at one moment: `optimizer.loss_scale_config.cur_scale`."""

    def __init__(
        self,
        low_precision_dtype: torch.dtype,
        dynamic_loss_scale: bool,
        static_loss_scale: float,
        dynamic_loss_args: Mapping[str, Any] | None,
        *,
        profile: LossScaleProfile = LossScaleProfile.FUSED,
        initial_dynamic_scale: float | None = None,
    ) -> None:
        self.use_grad_scaling = low_precision_dtype == torch.float16
        self.dynamic_loss_scale = self.use_grad_scaling and dynamic_loss_scale
        self.cur_iter = 0
        self.cur_scale = float(static_loss_scale) if self.use_grad_scaling else 1.0
        self.last_overflow_iter = self.scale_factor = self.scale_window = self.min_loss_scale = None
        if not self.dynamic_loss_scale:
            return
        first = LOSS_SCALE_PROFILE_INITIAL[profile] if initial_dynamic_scale is None else initial_dynamic_scale
        given = dynamic_loss_args or {
            INITIAL_LOSS_SCALE: first,
            SCALE_WINDOW: 1000,
            MIN_LOSS_SCALE: _PROFILE_MINIMUM[profile],
        }
        self.cur_scale = given[INITIAL_LOSS_SCALE]
        self.last_overflow_iter, self.scale_factor = -1, 2.0
        self.scale_window, self.min_loss_scale = given[SCALE_WINDOW], given[MIN_LOSS_SCALE]
