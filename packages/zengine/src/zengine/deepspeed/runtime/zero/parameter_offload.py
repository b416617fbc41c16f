"""`deepspeed.runtime.zero.parameter_offload`: the class of `optimizer.parameter_offload` at stage 3."""

from __future__ import annotations

from zengine.deepspeed.marks import ParameterOffload as DeepSpeedZeRoOffload
from zengine.deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus
from zengine.deepspeed.runtime.zero.utils import apply_to_tensors_only, is_zero_param

__all__ = [
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "apply_to_tensors_only",
    "is_zero_param",
]
