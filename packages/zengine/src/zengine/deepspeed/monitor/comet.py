"""`deepspeed.monitor.comet`."""

from __future__ import annotations

from typing import final

from zengine.deepspeed.monitor.base import SinkMonitor

__all__ = ["CometMonitor"]


@final
class CometMonitor(SinkMonitor):
    """Monitor of the section `comet`: Comet experiments."""

    section = "comet"
