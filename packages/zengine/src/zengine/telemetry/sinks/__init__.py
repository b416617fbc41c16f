"""The places that telemetry writes to."""

from zengine.telemetry.sinks.base import (
    Events,
    MissingPackageError,
    Sink,
    Sinks,
    folder_of,
    is_installed,
    require_packages,
)
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
]
