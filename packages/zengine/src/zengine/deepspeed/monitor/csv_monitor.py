"""`deepspeed.monitor.csv_monitor`."""

from __future__ import annotations

from typing import final

from zengine.deepspeed.monitor.base import SinkMonitor

__all__ = ["csvMonitor"]


@final
class csvMonitor(SinkMonitor):  # noqa: N801
    """Monitor of the section `csv_monitor`: CSV files, one for each tag."""

    section = "csv_monitor"
