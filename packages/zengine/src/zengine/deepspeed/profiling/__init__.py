"""`deepspeed.profiling`."""

from __future__ import annotations

from zengine.deepspeed.profiling import flops_profiler

__all__ = ["flops_profiler"]
