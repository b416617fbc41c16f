"""`deepspeed.monitor.monitor.MonitorMaster`: writes a script's events to the monitors of a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

from zengine.config import Facts, load, resolve
from zengine.deepspeed.comm.world import get_rank
from zengine.telemetry.sinks import Sinks
from zengine.telemetry.sinks.table import SINKS, open_sinks, require_packages

__all__ = ["MonitorMaster"]

_SECTIONS = ("tensorboard", "csv_monitor", "wandb", "comet")
_ROWS = [row for row in SINKS if row.section in _SECTIONS]


@final
class MonitorMaster:
    """Writes events to those of TensorBoard, CSV, W&B and Comet that `monitor_config` enables, on rank 0.

    monitor_config: a config (dict, path, JSON text) with these sections, or an engine's `plan.telemetry`.
    """

    def __init__(self, monitor_config: Any) -> None:
        plan = monitor_config if hasattr(monitor_config, "csv_monitor") else _telemetry(monitor_config)
        self.enabled = any(getattr(plan, name).enabled for name in _SECTIONS)
        require_packages(plan, _ROWS)
        self._sinks = open_sinks(plan, rows=_ROWS) if get_rank() == 0 else Sinks()

    def write_events(self, event_list: Iterable[tuple[str, float, int]]) -> None:
        """Write (tag, value, samples) triples."""
        self._sinks.write_events([(tag, float(value), int(samples)) for tag, value, samples in event_list])

    def close(self) -> None:
        """Close the files."""
        self._sinks.close()


def _telemetry(config: Any) -> Any:
    settings = {name: config[name] for name in _SECTIONS if name in config} if isinstance(config, Mapping) else config
    if isinstance(settings, dict):
        settings = {"train_batch_size": 1, **settings}
    return resolve(load(settings), Facts(world_size=1, replicas=1)).telemetry
