"""`deepspeed.runtime.zero.config`: names for the stages."""

from __future__ import annotations

import enum

__all__ = ["OffloadDeviceEnum", "ZeroStageEnum"]


class ZeroStageEnum(enum.IntEnum):
    """What is split over the ranks."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, enum.Enum):
    """Where something is put."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
