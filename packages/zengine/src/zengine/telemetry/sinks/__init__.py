"""Sinks: where telemetry writes its snapshots.  `zengine.telemetry.sinks.table` lists those of the config."""

from zengine.imports import lazy_attributes
from zengine.telemetry.sinks.base import (
    Events,
    MissingPackageError,
    ServiceSink,
    Sink,
    Sinks,
    is_installed,
    log_os_errors,
)

__all__ = ["Events", "MissingPackageError", "ServiceSink", "Sink", "Sinks", "is_installed", "log_os_errors"]

RENAMED = {
    "Bench": "zengine.telemetry.sinks.bench.Bench",
    "CometSink": "zengine.telemetry.sinks.comet.CometSink",
    "Console": "zengine.telemetry.sinks.console.Console",
    "CsvSink": "zengine.telemetry.sinks.csv.CsvSink",
    "JsonlSink": "zengine.telemetry.sinks.jsonl.JsonlSink",
    "TensorBoardSink": "zengine.telemetry.sinks.tensorboard.TensorBoardSink",
    "WandbSink": "zengine.telemetry.sinks.wandb.WandbSink",
    "folder_of": "zengine.telemetry.sinks.table.folder_of",
    "require_packages": "zengine.telemetry.sinks.table.require_packages",
    "training_goes_on": "zengine.telemetry.sinks.log_os_errors",
}

__getattr__, __dir__ = lazy_attributes(__name__, {}, RENAMED)
