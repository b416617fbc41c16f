"""The class of the optimizer that `deepspeed.initialize` returns: its own, and DeepSpeed's for the same config.

DeepSpeed wraps an optimizer by precision and ZeRO stage, and code asks for the wrapper (`isinstance(optimizer,
DeepSpeedZeroOptimizer)`, `optimizer.cur_scale`) as well as for the class inside (`isinstance(optimizer.optimizer,
FusedAdam)`).  Until the engine closes, the optimizer's class is derived from its own and from these two.  Attributes
of its own come first; copies and pickles have its own class.  In float32 at stage 0 DeepSpeed has no wrapper, and
the class changes only if the config made the optimizer.

Rejected: a wrapper (`isinstance(optimizer, AdamW)` and torch's schedules fail); a metaclass with `__instancecheck__`
(the attributes would still be missing).
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, final

import torch

import zoptim
from zengine.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from zengine.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zengine.deepspeed.ops.lamb import FusedLamb
from zengine.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from zengine.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, EngineFacts
from zengine.deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from zengine.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from zengine.deepspeed.runtime.fp16.loss_scaler import loss_scaler_over
from zengine.deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from zengine.deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from zengine.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from zengine.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from zengine.features import Feature
from zengine.imports import is_pipeline

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.engine.parts import Run
    from zengine.step_report import StepReport

__all__ = ["ReturnedOptimizer"]

_HALF = (torch.float16, torch.bfloat16)


@final
class ReturnedOptimizer(Feature):
    """Names of an engine's optimizer, and its flag `overflow`, by which Accelerate detects a skipped step."""

    def __init__(self, *, is_clients: bool, mpu: Any = None) -> None:
        """Make the feature.  is_clients: the caller passed the optimizer; the config did not make it."""
        self._is_clients, self._mpu = is_clients, mpu

    def attach(self, run: Run) -> None:
        optimizer: Any = run.optimizer
        self._optimizer, self._own = optimizer, type(optimizer)
        self._facts: EngineFacts | None = None
        if optimizer is None:
            return
        own: Any = type(optimizer)
        inner: Any = type(None) if self._is_clients else _deepspeeds_class(own, run.plan)
        wrapper: Any = _wrapper(own if inner is type(None) else inner, run)
        if wrapper is type(None):
            optimizer.overflow = False
        else:
            self._facts = EngineFacts(
                plan=run.plan,
                loss_scaler=loss_scaler_over(run.parts.scaler),
                find_partition=weakref.ref(run.parts.partition),
                mpu=self._mpu,
            )
        if (inner, wrapper) != (type(None), type(None)):
            own_names = frozenset(
                name for name in vars(optimizer) if hasattr(wrapper, name) and not hasattr(own, name)
            )
            optimizer.__class__ = _derived(own, inner, wrapper, own_names)
        if self._facts is not None:
            optimizer.engine_facts = self._facts

    def step_end(self, report: StepReport) -> None:
        facts = self._facts
        if facts is None:
            if self._optimizer is not None:
                self._optimizer.overflow = not report.applied
            return
        facts.overflow, facts.grad_norm = not report.applied, report.grad_norm
        if facts.loss_scaler.dynamic:
            scaler: Any = facts.loss_scaler
            scaler.cur_iter = report.step
            if facts.overflow:
                scaler.last_overflow_iter = report.step - 1

    def close(self) -> None:
        if self._optimizer is not None:
            self._optimizer.__class__ = self._own
            vars(self._optimizer).pop("engine_facts", None)


def _deepspeeds_class(own: type[Any], plan: Plan) -> type[Any]:
    """Return DeepSpeed's class for one of class `own` that the config made; NoneType if DeepSpeed takes torch's."""
    is_on_host = plan.offloads.get("offload_optimizer", "none") != "none"
    classes: dict[type[Any], tuple[type[Any], type[Any]]] = {
        zoptim.Adam: (FusedAdam, DeepSpeedCPUAdam),
        zoptim.AdamW: (FusedAdam, DeepSpeedCPUAdam),
        zoptim.Lion: (FusedLion, DeepSpeedCPULion),
        zoptim.LAMB: (FusedLamb, FusedLamb),
        zoptim.Adagrad: (type(None), DeepSpeedCPUAdagrad),
        zoptim.OneBitAdam: (OnebitAdam, OnebitAdam),
        zoptim.OneBitLamb: (OnebitLamb, OnebitLamb),
        zoptim.ZeroOneAdam: (ZeroOneAdam, ZeroOneAdam),
    }
    return classes.get(own, (type(None), type(None)))[is_on_host]


def _wrapper(basic: type[Any], run: Run) -> type[Any]:
    """Return the class with which DeepSpeed wraps an optimizer of class `basic`; NoneType if it does not."""
    plan, half = run.plan, run.plan.precision.param in _HALF
    types = plan.given.get("data_types")
    in_fp32 = str((types or {}).get("grad_accum_dtype", "")).removeprefix("torch.") in ("fp32", "float32")
    is_bf16 = plan.precision.param == torch.bfloat16
    if plan.zero.stage == 1 and is_bf16 and in_fp32 and plan.offloads.get("offload_optimizer", "none") == "none":
        return BF16_Optimizer
    if plan.zero.stage:
        return DeepSpeedZeroOptimizer_Stage3 if plan.zero.stage == 3 else DeepSpeedZeroOptimizer
    if is_bf16 and is_pipeline(run.module):
        return BF16_Optimizer
    if half:
        return FP16_Optimizer if issubclass(basic, FusedAdam) else FP16_UnfusedOptimizer
    return type(None)


@functools.cache
def _derived(own: Any, inner: Any, wrapper: Any, own_names: frozenset[str]) -> Any:
    """Return the subclass of `own` and DeepSpeed's classes; names in the instance's dict stay its own."""
    first = () if inner is type(None) else (inner,)
    last = () if wrapper is type(None) else (wrapper,)
    members = {"stands_for": own, "__module__": own.__module__, "__qualname__": own.__qualname__}
    if not last:
        members["__reduce_ex__"] = DeepSpeedOptimizer.__reduce_ex__
    kind: Any = type(own)
    return kind(own.__name__, (*first, own, *last), {**members, **dict.fromkeys(own_names)})
