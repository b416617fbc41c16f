"""`deepspeed.runtime`."""

from __future__ import annotations

from zengine.deepspeed.runtime import (
    activation_checkpointing,
    comm,
    config,
    constants,
    engine,
    lr_schedules,
    pipe,
    sequence_parallel,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "comm",
    "config",
    "constants",
    "engine",
    "lr_schedules",
    "pipe",
    "sequence_parallel",
    "utils",
    "zero",
]
