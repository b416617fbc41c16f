"""CSV sink: one file per tag, in the format of DeepSpeed's csv_monitor.

`Train/Samples/lr` becomes `Train_Samples_lr.csv` with the header `step,lr`, where `step` is the number of samples
seen, as in DeepSpeed.  Our own tags (`train_loss.csv`, ...) use the step number.  Existing files are appended to.
Rejected: one table for all tags, since tags come and go during a run (throughput after the warm-up) and a table
cannot grow a column.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TextIO, final

from zengine.telemetry.sinks.base import Events, Sink
from zengine.telemetry.snapshot import Snapshot


@final
class CsvSink(Sink):
    """Appends one row per boundary to each tag's file in `folder` and flushes it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, TextIO] = {}  # by tag

    def write(self, snapshot: Snapshot) -> None:
        self.write_events([(tag, value, snapshot.x(tag)) for tag, value in snapshot.scalars().items()])

    def write_events(self, events: Events) -> None:
        for tag, value, x in events:
            file = self._files.get(tag) or self._open(tag)
            csv.writer(file).writerow([x, repr(float(value))])
            file.flush()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def _open(self, tag: str) -> TextIO:
        path = self._folder / f"{tag.replace('/', '_').replace(' ', '_')}.csv"
        file = self._files[tag] = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115
        if file.tell() == 0:
            csv.writer(file).writerow(["step", tag.rsplit("/", 1)[-1]])
        return file
