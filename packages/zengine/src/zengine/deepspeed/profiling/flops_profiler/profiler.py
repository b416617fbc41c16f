"""`deepspeed.profiling.flops_profiler.profiler`: zengine's profiler, and DeepSpeed's texts of amounts."""

from __future__ import annotations

from zengine.flops import FlopsProfiler, get_model_profile

__all__ = [
    "DEFAULT_PRECISION",
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]

DEFAULT_PRECISION = 2  # decimals

_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format a number with a prefix (T, G, M, K, none, m, u): 1234 gives "1.23 K".

    units: the prefix; None: the largest that is not above the number.
    """
    if units is None:
        units = next((unit for unit, magnitude in _MAGNITUDES.items() if num >= magnitude), "u") if num else ""
    return f"{round(num / _MAGNITUDES.get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format multiply-adds: "1.23 KMACs"."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format floating-point operations, or their rate: "1.23 KFLOPS"."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format bytes with decimal prefixes: "1.23 KB"."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format a number of parameters, with B for billions: "1.23 K"."""
    prefix = units.replace("B", "G") if units else units
    return number_to_string(params_num, prefix, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = DEFAULT_PRECISION) -> str:
    """Format seconds: "1.2 ms"."""
    return f"{number_to_string(duration, units, precision)}s"
