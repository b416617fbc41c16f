"""What the plan says of precision beyond the dtypes themselves, and its rows in the plan's table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch

from zprecision import DynamicScaling, StaticScaling

if TYPE_CHECKING:
    from zengine.config.plan import Plan

__all__ = ["PLAIN", "Float8Plan", "NumericsPlan", "precision_rows"]


@attrs.frozen(kw_only=True)
class Float8Plan:
    """Which linear layers multiply in 8-bit floats; none without a pattern."""

    modules: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class NumericsPlan:
    """How forward runs and what the optimizer keeps, where the dtypes of weights do not say it."""

    autocast: torch.dtype = torch.float32  # dtype of torch.autocast around forward; float32: none
    float8: Float8Plan = Float8Plan()
    narrow_states: bool = False  # optimizer states in bf16 were asked for
    amp_level: str = ""  # the Apex level that was asked for; "" without an amp section


PLAIN = NumericsPlan()


def precision_rows(plan: Plan) -> Iterator[tuple[str, Any]]:
    """(key of the config, value), for `Plan.describe`."""
    param, scaling = plan.precision.param, plan.scaling
    yield "fp16.enabled", param == torch.float16
    if param == torch.float16:
        yield "fp16.auto_cast", plan.cast_inputs
        yield "fp16.fp16_master_weights_and_grads", plan.precision.master == torch.float16
        yield "fp16.loss_scale", scaling.factor if isinstance(scaling, StaticScaling) else "dynamic"
        yield from _dynamic_rows(scaling)
    yield "bf16.enabled", param == torch.bfloat16
    if param == torch.bfloat16:
        yield "bf16.check_grad_overflow", plan.skip_nonfinite
        yield "bf16.bf16_master_weights_and_grads", plan.precision.master == torch.bfloat16
        yield "bf16.bf16_optimizer_states", plan.numerics.narrow_states
    yield from _autocast_rows(plan)
    yield "data_types.grad_accum_dtype", plan.precision.accumulate or "(each parameter's)"
    yield "data_types.param_dtype", param or "(the model's)"
    yield "data_types.buffer_dtype", plan.precision.buffer or "(each buffer's)"
    yield "data_types.keep_in_fp32_modules", _kept(plan)
    yield "fp8.enabled", bool(plan.numerics.float8.modules)
    if plan.numerics.float8.modules:
        yield "fp8.modules", ", ".join(plan.numerics.float8.modules)
        yield "fp8.exclude", ", ".join(plan.numerics.float8.exclude) or "(none)"


def _autocast_rows(plan: Plan) -> Iterator[tuple[str, Any]]:
    lower, scaling = plan.numerics.autocast, plan.scaling
    yield "amp.enabled", bool(plan.numerics.amp_level)
    if plan.numerics.amp_level:
        yield "amp.opt_level", plan.numerics.amp_level
        yield "amp.loss_scale", scaling.factor if isinstance(scaling, StaticScaling) else "dynamic"
    yield "torch_autocast.enabled", lower != torch.float32
    if lower != torch.float32:
        yield "torch_autocast.dtype", lower
        yield "torch_autocast.lower_precision_safe_modules", ", ".join(plan.zero.narrow_classes) or "(none)"
    if lower == torch.float16:
        yield "torch_autocast.loss_scale", scaling.factor if isinstance(scaling, StaticScaling) else "dynamic"


def _dynamic_rows(scaling: object) -> Iterator[tuple[str, Any]]:
    if isinstance(scaling, DynamicScaling):
        yield "fp16.initial_scale_power", f"starts at {scaling.initial:g}"
        yield "fp16.loss_scale_window", scaling.window
        yield "fp16.hysteresis", scaling.hysteresis
        yield "fp16.consecutive_hysteresis", scaling.consecutive_hysteresis
        yield "fp16.min_loss_scale", scaling.floor


def _kept(plan: Plan) -> str:
    keep = plan.precision.keep
    return "(what the model lists)" if keep.as_listed else ", ".join(keep.patterns) or "(none)"
