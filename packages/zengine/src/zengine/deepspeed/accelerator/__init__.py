"""`deepspeed.accelerator`: the device of this process, by DeepSpeed's names."""

from __future__ import annotations

from zengine.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from zengine.deepspeed.accelerator.real_accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
