"""`deepspeed.monitor.monitor.MonitorMaster`: a script's own events, into the monitors that a config names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

from zengine.config import Facts, load, resolve
from zengine.deepspeed.comm.world import get_rank
from zengine.telemetry.sinks import CometSink, CsvSink, Sinks, TensorBoardSink, WandbSink, folder_of, require_packages

__all__ = ["MonitorMaster"]

_SECTIONS = ("tensorboard", "csv_monitor", "wandb", "comet")


@final
class MonitorMaster:
    """Writes events to TensorBoard, CSV, W&B and Comet, as far as `monitor_config` enables them; from rank 0 alone.

    monitor_config: a config (dict, path, JSON text), of which these sections are read, or an engine's
        `plan.telemetry`.
    """

    def __init__(self, monitor_config: Any) -> None:
        plan = monitor_config if hasattr(monitor_config, "csv_monitor") else _telemetry(monitor_config)
        self.enabled = any(getattr(plan, name).enabled for name in _SECTIONS)
        self._sinks = Sinks()
        require_packages(plan)
        if get_rank() != 0:
            return
        if plan.tensorboard.enabled:
            folder = folder_of(plan.tensorboard)
            self._sinks.add(f"TensorBoard events in {folder}", lambda: TensorBoardSink(folder))
        if plan.csv_monitor.enabled:
            place = folder_of(plan.csv_monitor)
            self._sinks.add(f"CSV files in {place}", lambda: CsvSink(place))
        if plan.wandb.enabled:
            self._sinks.add(f"Weights & Biases project {plan.wandb.project!r}", lambda: WandbSink(plan.wandb))
        if plan.comet.enabled:
            self._sinks.add(f"Comet project {plan.comet.project!r}", lambda: CometSink(plan.comet))

    def write_events(self, event_list: Iterable[tuple[str, float, int]]) -> None:
        """Write (tag, value, samples) triples."""
        self._sinks.write_events([(tag, float(value), int(samples)) for tag, value, samples in event_list])

    def close(self) -> None:
        """End the files."""
        self._sinks.close()


def _telemetry(config: Any) -> Any:
    settings = {name: config[name] for name in _SECTIONS if name in config} if isinstance(config, Mapping) else config
    if isinstance(settings, dict):
        settings = {"train_batch_size": 1, **settings}
    return resolve(load(settings), Facts(world_size=1, replicas=1)).telemetry
