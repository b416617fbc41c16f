"""`deepspeed.runtime.zero.config`: enums of stages and offload devices."""

from __future__ import annotations

import enum

__all__ = ["OffloadDeviceEnum", "ZeroStageEnum"]


class ZeroStageEnum(enum.IntEnum):
    """ZeRO stages, named by what they shard."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, enum.Enum):
    """Offload targets."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
