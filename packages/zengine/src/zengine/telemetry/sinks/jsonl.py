"""JSONL sink: machine-readable run folder with `run.json`, written at start, and one line of `events.jsonl` per step.

    {"step": 3, "samples": 96, "time_s": 1.25, "values": {"train/loss": 2.5, ...}}

`time_s` counts from the start of this process's part of the run.  A resumed run appends to the file; where steps were
lost and repeated, the later line counts.  NaN and infinities, which JSON lacks, are written as the strings "NaN",
"Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

from zengine.telemetry.sinks.base import Events, Sink
from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.subject import RunRecord

EVENTS, RUN = "events.jsonl", "run.json"


@final
class JsonlSink(Sink):
    """Appends to `events.jsonl` in `folder` and flushes each line."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._clock = clock
        self._start = clock()
        self._place = (0, 0)  # step and samples of the last boundary
        self._own: dict[str, float] = {}  # the program's, since then
        self._file = open(folder / EVENTS, "a", encoding="utf-8")  # noqa: SIM115

    def begin(self, record: RunRecord) -> None:
        write_record(self._folder, record)

    def write(self, snapshot: Snapshot) -> None:
        self._place = (snapshot.report.step, snapshot.report.samples)
        self._put(snapshot.scalars())

    def write_events(self, events: Events) -> None:
        self._own.update((tag, float(value)) for tag, value, _ in events)

    def close(self) -> None:
        if self._own:
            self._put({})
        self._file.close()

    def _put(self, scalars: Mapping[str, float]) -> None:
        """Write a line at the last boundary, with the program's own events."""
        values = {**scalars, **self._own}
        line = {
            "step": self._place[0],
            "samples": self._place[1],
            "time_s": round(self._clock() - self._start, 6),
            "values": values,
        }
        try:
            text = json.dumps(line, allow_nan=False)
        except ValueError:  # seldom: looking at every number first takes longer than writing it
            text = json.dumps({**line, "values": {tag: plain(value) for tag, value in values.items()}})
        self._own = {}
        self._file.write(text + "\n")
        self._file.flush()


def write_record(folder: Path, record: RunRecord) -> None:
    """Write `run.json` atomically."""
    part = folder / f"{RUN}.part"
    part.write_text(json.dumps(record.as_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(folder / RUN)


def plain(value: float) -> float | str:
    """Return `value`, or its name if JSON has no number for it."""
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
