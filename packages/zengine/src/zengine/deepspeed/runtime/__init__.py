"""`deepspeed.runtime`."""

from __future__ import annotations

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
