"""`deepspeed.monitor`."""

from __future__ import annotations

from zengine.deepspeed.monitor import monitor
from zengine.deepspeed.monitor.monitor import MonitorMaster

__all__ = ["MonitorMaster", "monitor"]
