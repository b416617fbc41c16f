"""`deepspeed.profiling.flops_profiler`: operations by module, counted as they run."""

from __future__ import annotations

from zengine.flops import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
