"""`deepspeed.monitor.monitor.MonitorMaster`: writes a script's events to the monitors of a config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from zengine.deepspeed.monitor.base import Monitor, SinkMonitor
from zengine.deepspeed.monitor.comet import CometMonitor
from zengine.deepspeed.monitor.config import SECTIONS, get_monitor_config
from zengine.deepspeed.monitor.csv_monitor import csvMonitor
from zengine.deepspeed.monitor.tensorboard import TensorBoardMonitor
from zengine.deepspeed.monitor.wandb import WandbMonitor

__all__ = ["Monitor", "MonitorMaster"]


@final
class MonitorMaster(Monitor):
    """Writes events to those of TensorBoard, CSV, W&B and Comet that `monitor_config` enables, on rank 0.

    monitor_config: a config (dict, path, JSON text) with these sections, a DeepSpeedMonitorConfig, or an engine's
    `plan.telemetry`.
    """

    def __init__(self, monitor_config: Any) -> None:
        plan: Any = monitor_config if hasattr(monitor_config, "csv_monitor") else get_monitor_config(monitor_config)
        super().__init__(plan)
        self.enabled = any(getattr(plan, name).enabled for name in SECTIONS)
        self.tb_monitor = TensorBoardMonitor(plan.tensorboard)
        self.wandb_monitor = WandbMonitor(plan.wandb)
        self.csv_monitor = csvMonitor(plan.csv_monitor)
        self.comet_monitor = CometMonitor(plan.comet)

    def write_events(self, event_list: Iterable[tuple[str, float, int]]) -> None:
        """Write (tag, value, samples) triples."""
        events = list(event_list)
        for each in self._monitors():
            each.write_events(events)

    def close(self) -> None:
        """Close the files."""
        for each in self._monitors():
            each.close()

    def _monitors(self) -> tuple[SinkMonitor, ...]:
        return self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor
