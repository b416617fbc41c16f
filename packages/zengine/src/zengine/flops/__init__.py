"""FLOPs: profiler, counters, recomputation probe, tables.

`FlopsProfiler` and `get_model_profile` are imported on first use.
"""

from typing import TYPE_CHECKING

from zengine.imports import lazy_attributes

if TYPE_CHECKING:
    from zengine.flops.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]

__getattr__, __dir__ = lazy_attributes(__name__, dict.fromkeys(__all__, "zengine.flops.profiler"))
