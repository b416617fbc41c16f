"""`deepspeed.monitor.config`: the sections of the monitors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from zengine.config import Facts, load, resolve
from zengine.config.keys.telemetry import Comet, EventFiles, TensorBoard, Wandb
from zengine.config.plan.telemetry import TelemetryPlan

__all__ = [
    "CSVConfig",
    "CometConfig",
    "DeepSpeedMonitorConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "get_monitor_config",
]

TensorBoardConfig: TypeAlias = TensorBoard
WandbConfig: TypeAlias = Wandb
CSVConfig: TypeAlias = EventFiles
CometConfig: TypeAlias = Comet
DeepSpeedMonitorConfig: TypeAlias = TelemetryPlan  # has the sections as attributes

SECTIONS = ("tensorboard", "csv_monitor", "wandb", "comet")


def get_monitor_config(param_dict: Any) -> DeepSpeedMonitorConfig:
    """Return the sections of a config: a dict, whose other keys are ignored, a path or JSON text.

    Raises zengine.config.ConfigError.
    """
    config = param_dict
    if isinstance(param_dict, Mapping):
        config = {"train_batch_size": 1, **{name: param_dict[name] for name in SECTIONS if name in param_dict}}
    return resolve(load(config), Facts(world_size=1, replicas=1)).telemetry
