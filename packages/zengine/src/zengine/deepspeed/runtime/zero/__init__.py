"""`deepspeed.zero`: sharded construction of models, and gathered parameters."""

from __future__ import annotations

from zengine.deepspeed.absent import absent
from zengine.deepspeed.runtime.zero import config, partition_parameters, stage3, stage_1_and_2
from zengine.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)

TiledLinear = absent("zero.TiledLinear")
MiCS_Init = absent("zero.MiCS_Init")

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "ZeroParamStatus",
    "ZeroParamType",
    "config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "unregister_external_parameter",
]
