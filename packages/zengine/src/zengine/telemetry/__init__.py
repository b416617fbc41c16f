"""What training looked like: phase times, throughput, memory, communication; to files and the console.

    telemetry = make_telemetry(plan.telemetry, device=device, rank=rank, micro_batch_size=4, batch_size=32,
                               replicas=8)
    with telemetry.span("forward"): ...
    telemetry.micro_step_end()
    telemetry.step_end(report)        # at a boundary

Importing this package imports no writer: tensorboard and wandb are loaded when a plan enables them.
"""

from typing import TYPE_CHECKING

from zengine.lazily import importing
from zengine.telemetry.choosing import make_telemetry
from zengine.telemetry.silent import Silent

if TYPE_CHECKING:
    from zengine.telemetry.flops_profiler import FlopsProfiler, get_model_profile
    from zengine.telemetry.sinks import MissingPackageError
    from zengine.telemetry.stragglers import log_summary
    from zengine.telemetry.telemetry import Telemetry

__all__ = [
    "FlopsProfiler",
    "MissingPackageError",
    "Silent",
    "Telemetry",
    "get_model_profile",
    "log_summary",
    "make_telemetry",
]

# Imported on first use: a run that measures nothing needs none of it.
_HOME_OF = {
    "FlopsProfiler": "zengine.telemetry.flops_profiler",
    "get_model_profile": "zengine.telemetry.flops_profiler",
    "MissingPackageError": "zengine.telemetry.sinks",
    "log_summary": "zengine.telemetry.stragglers",
    "Telemetry": "zengine.telemetry.telemetry",
}

__getattr__ = importing(__name__, _HOME_OF)
