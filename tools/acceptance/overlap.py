"""Overlap in a trace of torch.profiler: how much of the copies' time is beside kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["busy_intervals", "hidden_share"]

Interval = tuple[float, float]


def busy_intervals(events: Iterable[Mapping[str, Any]], categories: Sequence[str]) -> list[Interval]:
    """Return when a device works on `categories` ("kernel", "gpu_memcpy"), merged and sorted, in microseconds.

    events: "traceEvents" of a Chrome trace.
    """
    found = sorted(
        (float(each["ts"]), float(each["ts"]) + float(each["dur"]))
        for each in events
        if each.get("ph") == "X" and each.get("cat") in categories
    )
    merged: list[Interval] = []
    for begin, end in found:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def hidden_share(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of the copies' time during which a kernel runs; None without copies."""
    copies, kernels = busy_intervals(events, ("gpu_memcpy",)), busy_intervals(events, ("kernel",))
    whole = sum(end - begin for begin, end in copies)
    beside = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in kernels)
    return beside / whole if whole else None
