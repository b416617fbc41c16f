"""`deepspeed.monitor.tensorboard`."""

from __future__ import annotations

from typing import final

from zengine.deepspeed.monitor.base import SinkMonitor

__all__ = ["TensorBoardMonitor"]


@final
class TensorBoardMonitor(SinkMonitor):
    """Monitor of the section `tensorboard`: TensorBoard event files."""

    section = "tensorboard"
