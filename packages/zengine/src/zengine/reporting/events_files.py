"""Reader of TensorBoard's event files, for runs that left nothing else, including DeepSpeed's own.

Two families of tags: DeepSpeed's lie over samples, the others over steps.  Every boundary writes both, so the n-th
samples belong to the n-th step; without steps, boundaries are counted from one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["PATTERN", "read_event_files"]

PATTERN = "events.out.tfevents.*"
SAMPLES = "Train/Samples/"

Series = Mapping[int, tuple[float, float]]  # x -> (wall time in seconds, value); the last one written counts


def read_event_files(folder: Path) -> list[dict[str, Any]]:
    """Return rows as in events.jsonl, in the order of the steps.  Raises ImportError without tensorboard."""
    scalars = _scalars(folder)
    families: list[dict[str, Series]] = [
        {tag: series for tag, series in scalars.items() if tag.startswith(SAMPLES) is over_samples}
        for over_samples in (False, True)
    ]
    steps, samples = (sorted({x for series in family.values() for x in series}) for family in families)
    by_samples = dict(zip(steps if len(steps) == len(samples) else range(1, len(samples) + 1), samples))
    axis = by_samples if samples and (not steps or len(steps) == len(samples)) else dict.fromkeys(steps, 0)
    begin = min((when for series in scalars.values() for when, _ in series.values()), default=0.0)
    lines = []
    for step, at in axis.items():
        found = {tag: series[x] for family, x in zip(families, (step, at)) for tag, series in _at(family, x)}
        time_s = max((when for when, _ in found.values()), default=begin) - begin
        values = {tag: value for tag, (_, value) in found.items()}
        lines.append({"step": step, "samples": at, "time_s": time_s, "values": values})
    return lines


def _at(family: Mapping[str, Series], x: int) -> Iterable[tuple[str, Series]]:
    """Return the series that have a point there."""
    return ((tag, series) for tag, series in family.items() if x in series)


def _scalars(folder: Path) -> dict[str, Series]:
    from tensorboard.backend.event_processing import event_accumulator  # late: it loads half of TensorBoard

    reader: Any = event_accumulator.EventAccumulator(str(folder), size_guidance={event_accumulator.SCALARS: 0})
    reader.Reload()
    return {
        tag: {point.step: (point.wall_time, point.value) for point in reader.Scalars(tag)}
        for tag in reader.Tags()[event_accumulator.SCALARS]
    }
