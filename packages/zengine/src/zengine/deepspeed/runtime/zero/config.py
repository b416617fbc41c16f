"""`deepspeed.runtime.zero.config`: the section `zero_optimization` as an object, and enums of its values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar, final

from zengine.config.grammar.table import section_of
from zengine.config.keys.zero import ZERO, ZERO_SHORTHAND, Zero
from zengine.deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from zengine.deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from zengine.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)
from zengine.deepspeed.section_model import SectionModel

__all__ = [
    "ZERO_OPTIMIZATION",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroLeafModuleConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
    "get_zero_config",
    "read_zero_config_deprecated",
]

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(enum.IntEnum):
    """ZeRO stages, named by what they shard."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


@final
class DeepSpeedZeroConfig(SectionModel):
    """Section `zero_optimization`; keys with the prefix "stage3_" are attributes without it."""

    rows = section_of(Zero, ZERO)
    defaults: ClassVar[Mapping[str, Any]] = {
        "reduce_bucket_size": 500_000_000,
        "allgather_bucket_size": 500_000_000,
        "sub_group_size": 1_000_000_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "elastic_checkpoint": False,
        "parameter_alignment": False,
        "override_module_apply": True,
        "stage3_module_granularity_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": False,
        "leaf_module": DeepSpeedZeroLeafModuleConfig,
    }
    models: ClassVar[Mapping[str, type[SectionModel]]] = {
        "offload_param": DeepSpeedZeroOffloadParamConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "leaf_module": DeepSpeedZeroLeafModuleConfig,
        "zenflow": ZenFlowConfig,
    }
    title = ZERO_OPTIMIZATION
    stage: int
    overlap_comm: bool
    offload_param: DeepSpeedZeroOffloadParamConfig | None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None
    leaf_module: DeepSpeedZeroLeafModuleConfig
    zenflow: ZenFlowConfig | None

    def __init__(self, strict: bool = False, **data: Any) -> None:
        off = {name for name in ("cpu_offload", "cpu_offload_param", "cpu_offload_params") if data.get(name) is False}
        super().__init__(strict, **{name: value for name, value in data.items() if name not in off})
        if "overlap_comm" not in self.model_fields_set or data["overlap_comm"] is None:
            vars(self)["overlap_comm"] = self.stage == ZeroStageEnum.weights  # DeepSpeed's default


def read_zero_config_deprecated(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section that `"zero_optimization": true` or `false` means."""
    found = dict(ZERO_SHORTHAND[bool(param_dict[ZERO_OPTIMIZATION])])
    if found["stage"]:
        found["allgather_bucket_size"] = param_dict.get("allgather_size", 500_000_000)
    return found


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return the section of a whole config; the defaults if it has none.  Raises as DeepSpeedZeroConfig does."""
    given = param_dict.get(ZERO_OPTIMIZATION, {})
    return DeepSpeedZeroConfig(**(read_zero_config_deprecated(param_dict) if isinstance(given, bool) else given))
