"""Predicted times of zoptim's GPU kernels, for whoever measures: the table of `sass.py`, and the rule of 15%.

    >>> from predicted import device_of, predicted, verdict
    >>> guess = predicted("adam: f32 f32 f32", 100_000_000, device_of("NVIDIA H200"))
    >>> verdict(guess, measured_us=700.0)

A prediction is for one launch that finds none of its data in a cache: measure with streams that exceed the
second-level cache four times (`is_comparable`), from the end of the kernel before to the end of this one.  A
measurement that differs by more than 15% is a defect of the model or of the kernel; a report must say which.

Uses only the standard library, so that a script on another machine can load this file and its table alone.
"""

from __future__ import annotations

import bisect
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["LIMIT", "Prediction", "device_of", "error", "predicted", "table", "verdict"]

TABLE = Path(__file__).resolve().parent / "results" / "predicted-gpu.json"
LIMIT = 0.15  # of the predicted time
CACHES = 4  # a stream of that many times the second-level cache is not kept in it


class Prediction(NamedTuple):
    """The predicted time of one launch."""

    us: float
    share: float  # of the attainable bandwidth of the device
    limit: str  # what limits it
    is_comparable: bool  # whether the launch moves enough bytes that caches do not matter


@functools.cache
def table() -> dict[str, Any]:
    """Return the committed table: versions, digest of the kernels' text, devices, numels, kernels."""
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


def device_of(name: str) -> str | None:
    """Return the key of a device by the name that torch.cuda gives it, or None if it has no predictions."""
    return next((key for key in table()["devices"] if key in name.lower().replace(" ", "")), None)


def predicted(kernel: str, numel: int, device: str) -> Prediction:
    """Return the prediction for a kernel, such as "adam: f32 f32 f32", and a number of elements.

    Between the table's sizes times are interpolated; beyond them they are proportional.  Raises KeyError that lists
    what there is for an unknown kernel or device.
    """
    known = table()
    if kernel not in known["kernels"] or device not in known["devices"]:
        raise KeyError(
            f"no prediction for {kernel!r} on {device!r}; there are {', '.join(known['devices'])} and the kernels "
            f"{', '.join(known['kernels'])}.  Add others to gpumodel/variants.py and run sass.py."
        )
    row, numels = known["kernels"][kernel], known["numels"]
    points = row[device]
    above = bisect.bisect_left(numels, numel)
    if above == len(numels):
        us, limit = points[-1][0] * numel / numels[-1], points[-1][2]
    elif above == 0:
        us, limit = points[0][0], points[0][2]  # a launch is not faster for fewer elements
    else:
        part = (numel - numels[above - 1]) / (numels[above] - numels[above - 1])
        us, limit = points[above - 1][0] * (1 - part) + points[above][0] * part, points[above][2]
    moved = row["bytes"] * numel
    facts = known["devices"][device]
    return Prediction(us, moved / us * 1e6 / facts["attainable"], limit, moved >= CACHES * facts["l2_bytes"])


def error(prediction: Prediction, measured_us: float) -> float:
    """Return (measured - predicted) / predicted."""
    return (measured_us - prediction.us) / prediction.us


def verdict(prediction: Prediction, measured_us: float) -> str:
    """Return a cell for a report: predicted beside measured, and a flag beyond 15%."""
    off = error(prediction, measured_us)
    said = f"predicted {prediction.us:.4g} us ({prediction.share:.0%}, {prediction.limit}), measured {off:+.0%}"
    if not prediction.is_comparable:
        return f"{said}; caches hold it, not compared"
    return f"{said}; MODEL DEFECT, over {LIMIT:.0%}" if abs(off) > LIMIT else f"{said}; within {LIMIT:.0%}"
