"""`deepspeed.monitor.wandb`."""

from __future__ import annotations

from typing import final

from zengine.deepspeed.monitor.base import SinkMonitor

__all__ = ["WandbMonitor"]


@final
class WandbMonitor(SinkMonitor):
    """Monitor of the section `wandb`: Weights & Biases."""

    section = "wandb"
