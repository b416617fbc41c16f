"""The places that telemetry writes to."""

from typing import TYPE_CHECKING

from zengine.lazily import importing
from zengine.telemetry.sinks.base import (
    Events,
    MissingPackageError,
    Sink,
    Sinks,
    folder_of,
    is_installed,
    require_packages,
    training_goes_on,
)

if TYPE_CHECKING:
    from zengine.telemetry.sinks.bench import Bench
    from zengine.telemetry.sinks.comet import CometSink
    from zengine.telemetry.sinks.console import Console
    from zengine.telemetry.sinks.csv import CsvSink
    from zengine.telemetry.sinks.jsonl import JsonlSink
    from zengine.telemetry.sinks.tensorboard import TensorBoardSink
    from zengine.telemetry.sinks.wandb import WandbSink

__all__ = [
    "Bench",
    "CometSink",
    "Console",
    "CsvSink",
    "Events",
    "JsonlSink",
    "MissingPackageError",
    "Sink",
    "Sinks",
    "TensorBoardSink",
    "WandbSink",
    "folder_of",
    "is_installed",
    "require_packages",
    "training_goes_on",
]

# Imported on first use: a run that measures nothing needs none of it.
_HOME_OF = {
    "Bench": "zengine.telemetry.sinks.bench",
    "CometSink": "zengine.telemetry.sinks.comet",
    "Console": "zengine.telemetry.sinks.console",
    "CsvSink": "zengine.telemetry.sinks.csv",
    "JsonlSink": "zengine.telemetry.sinks.jsonl",
    "TensorBoardSink": "zengine.telemetry.sinks.tensorboard",
    "WandbSink": "zengine.telemetry.sinks.wandb",
}

__getattr__ = importing(__name__, _HOME_OF)
