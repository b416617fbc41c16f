"""`deepspeed.compression`: models that become smaller in training."""

from __future__ import annotations

from zengine.deepspeed.compression import basic_layer, compress, config, helper, scheduler, utils
from zengine.deepspeed.compression.compress import init_compression, redundancy_clean
from zengine.deepspeed.compression.scheduler import compression_scheduler

__all__ = [
    "basic_layer",
    "compress",
    "compression_scheduler",
    "config",
    "helper",
    "init_compression",
    "redundancy_clean",
    "scheduler",
    "utils",
]
