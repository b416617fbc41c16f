"""`deepspeed.profiling.flops_profiler`: operations by module, counted as they run."""

from __future__ import annotations

from zengine.deepspeed.profiling.flops_profiler.profiler import (
    FlopsProfiler,
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    get_model_profile,
    macs_to_string,
    number_to_string,
    params_to_string,
)

__all__ = [
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]
