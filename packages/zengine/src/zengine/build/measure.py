"""`bf16.enabled: "auto"`: measured on rank 0, and the same on all ranks."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

import zcomm
import zprecision
from zengine.config import Config

FASTER_BY = 1.1  # below that, the memory saved is not worth the precision lost


def bf16_is_faster(config: Config, device: torch.device, group: ProcessGroup | None) -> bool:
    """Return whether bf16 matrix products beat fp32 ones here; False, without measuring, when no key asks."""
    if config.settings.bf16.enabled != "auto":
        return False
    measured = zcomm.group_rank(group) == 0 and zprecision.measure_bf16_speedup(device) >= FASTER_BY
    return bool(zcomm.all_gather_object(measured, group)[0])
