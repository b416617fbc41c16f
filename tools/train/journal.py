"""Journal: losses.jsonl, one JSON object per step or validation.

    {"step": 7, "loss": 4.61..., "lr": ..., "grad_norm": ..., "ms": ..., ...}      a step
    {"step": 50, "validation": 2.31...}                                            a validation

Losses are nats per byte with all digits, so two runs can be compared bit for bit.  A resumed run first drops the
lines after its checkpoint, because it repeats those steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from zengine.step_report import StepReport

Row = dict[str, Any]


class Journal:
    """Appends to the file on rank 0; on other ranks it only keeps time."""

    def __init__(self, path: Path, *, writes: bool, bytes_per_sample: int) -> None:
        self._path = path
        self._writes = writes
        self._bytes_per_sample = bytes_per_sample
        self._samples = 0  # seen by all ranks at the last boundary
        self._since = time.perf_counter()  # end of the last boundary, later by the pauses since
        self._file: TextIO | None = None

    def begin(self, *, step: int, samples: int) -> None:
        """Drop the rows after `step` and start the clock."""
        if self._writes:
            kept = [row for row in self.rows() if row["step"] <= step]
            self._path.write_text("".join(json.dumps(row) + "\n" for row in kept))
            self._file = self._path.open("a")
        self._samples, self._since = samples, time.perf_counter()

    def rows(self) -> list[Row]:
        """Return all complete rows; a kill may have truncated the last line."""
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def add(self, report: StepReport, *, memory_bytes: int) -> Row:
        """Add the row of a finished step and return it; its time runs from the last step, without pauses."""
        now = time.perf_counter()
        seconds = now - self._since
        row: Row = {
            "step": report.step,
            "loss": report.loss,
            "lr": report.lr[0],
            "grad_norm": report.grad_norm,
            "skipped": report.reason,
            "ms": seconds * 1e3,
            "bytes_per_s": (report.samples - self._samples) * self._bytes_per_sample / seconds,
            "memory_bytes": memory_bytes,
        }
        self._samples, self._since = report.samples, now
        self._write(row)
        return row

    def add_validation(self, step: int, loss: float) -> None:
        self._write({"step": step, "validation": loss})

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude validation or saving from the time of the next step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, row: Row) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
