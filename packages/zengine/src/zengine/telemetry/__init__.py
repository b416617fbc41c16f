"""Telemetry: phase times, throughput, memory and communication, written to files, services and the console.

    telemetry = make_telemetry(plan.telemetry, device=device, rank=rank, micro_batch_size=4, batch_size=32,
                               replicas=8)
    with telemetry.span("forward"): ...
    telemetry.micro_step_end()
    telemetry.step_end(report)        # at a boundary

Importing this package imports no writer: tensorboard and wandb are loaded when a plan enables them.
"""

from typing import TYPE_CHECKING

from zengine.imports import lazy_attributes
from zengine.telemetry.make import make_telemetry
from zengine.telemetry.silent import Silent

if TYPE_CHECKING:
    from zengine.telemetry.sinks import MissingPackageError
    from zengine.telemetry.stragglers import log_summary
    from zengine.telemetry.telemetry import Telemetry

__all__ = ["MissingPackageError", "Silent", "Telemetry", "log_summary", "make_telemetry"]

# Imported on first use: a run that measures nothing needs none of it.
_HOME_OF = {
    "MissingPackageError": "zengine.telemetry.sinks",
    "log_summary": "zengine.telemetry.stragglers",
    "Telemetry": "zengine.telemetry.telemetry",
}

RENAMED = {
    "FlopsProfiler": "zengine.flops.FlopsProfiler",
    "get_model_profile": "zengine.flops.get_model_profile",
}

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF, RENAMED)
