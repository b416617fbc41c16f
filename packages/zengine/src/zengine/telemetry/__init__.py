"""What training looked like: phase times, throughput, memory, communication; to files and the console.

    telemetry = make_telemetry(plan.telemetry, device=device, rank=rank, micro_batch_size=4, batch_size=32,
                               replicas=8)
    with telemetry.span("forward"): ...
    telemetry.micro_step_end()
    telemetry.step_end(report)        # at a boundary

Importing this package imports no writer: tensorboard and wandb are loaded when a plan enables them.
"""

from zengine.telemetry.flops_profiler import FlopsProfiler, get_model_profile
from zengine.telemetry.making import make_telemetry
from zengine.telemetry.silent import Silent
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
