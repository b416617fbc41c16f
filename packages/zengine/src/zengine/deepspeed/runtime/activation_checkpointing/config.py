"""`deepspeed.runtime.activation_checkpointing.config`: the section `activation_checkpointing` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from zengine.deepspeed.runtime.config_utils import DeepSpeedConfigObject

__all__ = ["ACT_CHKPT", "ACT_CHKPT_DEFAULT", "DeepSpeedActivationCheckpointingConfig"]

ACT_CHKPT = "activation_checkpointing"
ACT_CHKPT_DEFAULT: dict[str, Any] = {
    "partition_activations": False,
    "number_checkpoints": None,
    "contiguous_memory_optimization": False,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
    "cpu_checkpointing": False,
}


@final
class DeepSpeedActivationCheckpointingConfig(DeepSpeedConfigObject):
    """The section of a config (a dict), with DeepSpeed's defaults."""

    partition_activations: bool
    number_checkpoints: int | None
    contiguous_memory_optimization: bool
    synchronize_checkpoint_boundary: bool
    profile: bool
    cpu_checkpointing: bool

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        section = param_dict.get(ACT_CHKPT) or {}
        for key, default in ACT_CHKPT_DEFAULT.items():
            setattr(self, key, section.get(key, default))
