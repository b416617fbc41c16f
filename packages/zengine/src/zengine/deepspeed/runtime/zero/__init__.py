"""`deepspeed.zero`: sharded construction of models, and gathered parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.deepspeed.absent import absent
from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
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

_HOME_OF = homes_below(
    __name__,
    {
        "parameter_offload": "DeepSpeedZeRoOffload",
        "partition_parameters": "DeepSpeedTensorOverride GatheredParameters Init ZeroParamStatus ZeroParamType "
        "register_external_parameter unregister_external_parameter",
        "stage3": "unwrap_model_for_generation",
        "tiling": "TiledLinear TiledLinearReturnBias",
    },
)  # imported on first use

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF, with_submodules=True)
