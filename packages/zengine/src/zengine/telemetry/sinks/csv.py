"""CSV sink: one file per tag, in the format of DeepSpeed's csv_monitor.

`Train/Samples/lr` becomes `Train_Samples_lr.csv` with the header `step,lr`, where `step` is the number of samples
seen, as in DeepSpeed.  Our own tags (`train_loss.csv`, ...) use the step number.  Existing files are appended to.
Rejected: one table for all tags, since tags come and go during a run (throughput after the warm-up) and a table
cannot grow a column.

Tags may come from users and models.  A file name keeps letters, digits and a few signs of a tag, and has a hash of it
where others were replaced, so that no tag leaves the folder or shares a file; a header that a spreadsheet would take
for a formula gets an apostrophe.
"""

from __future__ import annotations

import csv
import hashlib
import re
from pathlib import Path
from typing import TextIO, final

from zengine.telemetry.sinks.base import Events, Sink
from zengine.telemetry.snapshot import Snapshot

_MAX_NAME = 120  # characters of a tag in a file name
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # beginnings that spreadsheets execute


def file_name(tag: str) -> str:
    """Return the name of a tag's file: `/` and spaces become `_`, as in DeepSpeed; other signs too, with a hash."""
    plain = tag.replace("/", "_").replace(" ", "_")
    safe = re.sub(r"[^\w.,=+@()\[\]-]", "_", plain)[:_MAX_NAME]
    safe = "_" + safe[1:] if safe[:1] in (".", "-") else safe
    if safe != plain:
        safe += "_" + hashlib.sha256(tag.encode(errors="replace")).hexdigest()[:8]
    return f"{safe or '_'}.csv"


def header_cell(tag: str) -> str:
    """Return the header of a tag's column, never a formula."""
    name = tag.rsplit("/", 1)[-1]
    return f"'{name}" if name.startswith(_FORMULA) else name


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
        path = self._folder / file_name(tag)
        file = self._files[tag] = open(path, "a", newline="", encoding="utf-8")  # noqa: SIM115
        if file.tell() == 0:
            csv.writer(file).writerow(["step", header_cell(tag)])
        return file
