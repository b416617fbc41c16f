"""`deepspeed.runtime`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import lazy_attributes

if TYPE_CHECKING:
    from zengine.deepspeed.runtime import (
        activation_checkpointing,
        base_optimizer,
        bf16_optimizer,
        comm,
        config,
        constants,
        engine,
        fp16,
        lr_schedules,
        pipe,
        sequence_parallel,
        utils,
        zero,
    )

__all__ = [
    "activation_checkpointing",
    "base_optimizer",
    "bf16_optimizer",
    "comm",
    "config",
    "constants",
    "engine",
    "fp16",
    "lr_schedules",
    "pipe",
    "sequence_parallel",
    "utils",
    "zero",
]

__getattr__, __dir__ = lazy_attributes(__name__, {}, with_submodules=True)  # imported on first use
