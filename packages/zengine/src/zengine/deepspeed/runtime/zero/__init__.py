"""`deepspeed.zero`: sharded construction of models, and gathered parameters."""

from __future__ import annotations

from zengine.deepspeed.absent import absent
from zengine.deepspeed.runtime.zero import config, partition_parameters, stage3, stage_1_and_2
from zengine.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from zengine.deepspeed.runtime.zero.partition_parameters import (
    DeepSpeedTensorOverride,
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from zengine.deepspeed.runtime.zero.stage3 import unwrap_model_for_generation
from zengine.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias

MiCS_Init = absent("zero.MiCS_Init")

__all__ = [
    "DeepSpeedTensorOverride",
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
