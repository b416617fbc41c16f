"""The places that telemetry writes to."""

from zengine.telemetry.sinks.base import MissingPackageError, Sink, Sinks, folder_of, require_packages
from zengine.telemetry.sinks.console import Console
from zengine.telemetry.sinks.csv import CsvSink
from zengine.telemetry.sinks.tensorboard import TensorBoardSink
from zengine.telemetry.sinks.wandb import WandbSink

__all__ = [
    "Console",
    "CsvSink",
    "MissingPackageError",
    "Sink",
    "Sinks",
    "TensorBoardSink",
    "WandbSink",
    "folder_of",
    "require_packages",
]
